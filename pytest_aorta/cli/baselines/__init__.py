"""The subcommand `aorta baselines`."""
