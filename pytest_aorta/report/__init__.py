"""Reports of a pytest session, or of two sets of results: an HTML page, ``summary.json`` and Markdown.

``data`` gathers the values of a report; ``page``, ``summary``, ``timeline`` and ``markdown`` render them, and ``write``
writes the files. No module here measures or decides.
"""
