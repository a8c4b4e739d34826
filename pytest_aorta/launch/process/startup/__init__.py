"""The folder that comes first on the path of a command that starts its own ranks."""
