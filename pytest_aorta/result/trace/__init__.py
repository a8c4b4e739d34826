"""Profiler traces, and the overlap of communication and compute computed from them."""
