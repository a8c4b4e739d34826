"""Launches of a plan: the command line, the guard, warm launches, and the observation of a running launch."""
