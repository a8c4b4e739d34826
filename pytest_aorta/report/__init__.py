"""Reports of a pytest session: an HTML page, Markdown and annotations.

``data`` gathers the values of a report; ``page``, ``timeline`` and ``markdown`` render them, and ``write`` writes the
files. No module here measures or decides.
"""
