"""Noise of a metric: what is assumed of it, and which tolerances it allows."""
