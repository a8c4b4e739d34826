"""Reports of a pytest session, or of two sets of results: an HTML page, ``summary.json`` and Markdown.

``data`` has the values of a report. ``from_session`` and ``from_results`` gather them; ``page``, ``summary``,
``timeline`` and ``markdown`` render them, and ``write`` writes the files. No module here measures or decides.
"""
