"""The peak memory of a training step, estimated before training, and the activation checkpointing that fits a budget."""
