"""Ordinary training scripts, and the faults that are found in them."""
