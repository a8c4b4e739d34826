"""Benchmarks by subject; docs/benchmarks.md says how to run each."""
