"""Code that every package may import: errors, strict files, text, schemas."""
