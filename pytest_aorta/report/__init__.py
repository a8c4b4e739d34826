"""Reports of a pytest session: an HTML page, ``summary.json`` and Markdown.

``data`` gathers the values of a report; ``page`` and ``markdown`` render them, and ``write`` writes the files. No
module here measures or decides.
"""
