"""Causes of a regression: what moved, by how much, and on which rank."""
