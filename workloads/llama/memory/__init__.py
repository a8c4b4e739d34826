"""The peak memory of a training step, estimated before training, and the checkpointing that fits a budget."""
