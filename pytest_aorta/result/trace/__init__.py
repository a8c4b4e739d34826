"""Profiler traces and the overlap that they show."""
