"""Launches of a plan: the command line, the guard, warm launches, and the watching of a running launch."""
