"""Benchmarks of launches: their cost, leases, and faults under load."""
