"""Verdicts from facts: metrics, baselines, tolerances."""
