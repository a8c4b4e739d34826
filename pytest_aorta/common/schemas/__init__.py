"""JSON Schemas of the files pytest-aorta writes and reads."""
