"""Search for the commit of a regression: pairs of launches and the log that a search resumes from."""
