"""Benchmarks of the location of a numeric difference."""
