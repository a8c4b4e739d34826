"""Errors, strict files, text, schemas and names that every other package may import."""
