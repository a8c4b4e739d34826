"""The static pages of a history."""
