"""The diagnosis of a failed launch."""
