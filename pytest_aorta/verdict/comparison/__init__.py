"""Comparison of launches with a stored baseline or with an A/B reference, metric by metric."""
