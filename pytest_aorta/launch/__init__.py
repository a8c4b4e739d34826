"""Launches of a plan: command, guard, warm launches, watching."""
