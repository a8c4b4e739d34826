"""Launches over several nodes."""
