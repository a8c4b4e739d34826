"""The command ``aorta history``."""
