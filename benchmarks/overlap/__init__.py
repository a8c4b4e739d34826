"""Benchmarks of measured overlap and of the profiler's effect."""
