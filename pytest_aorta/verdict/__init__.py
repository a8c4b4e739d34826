"""Verdicts on launches: metrics, tolerances, stored baselines, and the rules that compare them."""
