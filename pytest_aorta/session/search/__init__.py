"""Search for the commit of a regression: pairs of launches, and the log from which a search resumes."""
