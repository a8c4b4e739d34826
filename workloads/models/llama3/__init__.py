"""Llama 3: its attention, and how tensor parallelism splits it."""
