"""Benchmarks of the HTML report."""
