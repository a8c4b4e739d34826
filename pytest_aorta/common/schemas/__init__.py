"""JSON Schemas of the files that pytest-aorta writes."""
