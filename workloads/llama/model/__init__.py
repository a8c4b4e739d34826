"""The decoder of the Llama workloads: attention, experts, activation checkpointing and the loss."""
