"""One test's launches and comparisons."""
