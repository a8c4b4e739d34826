"""Measurement of overlap on a rank."""
