"""The history of comparisons: its entries, and the files that each run writes."""
