"""Parallelisms, one module each."""
