"""Comparison of two launches bit for bit."""
