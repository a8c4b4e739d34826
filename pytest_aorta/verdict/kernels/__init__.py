"""Kernel families: what moved when a time regressed, and each family as a compared quantity."""
