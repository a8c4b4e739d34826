"""Causes of a regression: the parts of a step that got slower, by how much, and on which rank."""
