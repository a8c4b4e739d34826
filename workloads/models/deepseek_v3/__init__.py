"""DeepSeek-V3: its attention, and how tensor parallelism splits it."""
