"""Benchmarks of the weight hash: throughput and quality."""
