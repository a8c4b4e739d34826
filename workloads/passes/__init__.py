"""Passes over the traced graphs of a model; ``compile.py`` has their list."""
