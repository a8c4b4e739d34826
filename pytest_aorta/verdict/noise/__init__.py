"""Noise of a metric: its priors, and the tolerances that it allows."""
