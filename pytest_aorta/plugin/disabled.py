"""Nothing: environments installed before this entry point was removed still import the module."""
