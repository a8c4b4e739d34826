"""Benchmarks of measured overlap and what the profiler changes."""
