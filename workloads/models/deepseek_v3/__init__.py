"""DeepSeek-V3."""
