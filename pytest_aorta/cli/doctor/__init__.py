"""The subcommand `aorta doctor`."""
