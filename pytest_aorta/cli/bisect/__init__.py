"""``aorta bisect``: the search for the commit that changed a metric of a test."""
