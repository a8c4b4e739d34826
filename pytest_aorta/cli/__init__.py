"""The `aorta` command: one module per subcommand."""
