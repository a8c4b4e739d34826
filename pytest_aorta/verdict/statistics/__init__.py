"""Pure statistical rules."""
