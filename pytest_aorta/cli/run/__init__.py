"""The subcommand `aorta run`."""
