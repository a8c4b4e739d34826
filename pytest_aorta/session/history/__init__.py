"""The lines that a run appends to the history, and writing them."""
