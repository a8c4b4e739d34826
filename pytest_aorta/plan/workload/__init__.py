"""Declarations of workloads."""
