"""Parallelisms, one module for each axis."""
