"""The weight hash."""
