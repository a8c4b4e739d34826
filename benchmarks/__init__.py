"""Benchmarks by subject; benchmarks/README.md says how to run them."""
