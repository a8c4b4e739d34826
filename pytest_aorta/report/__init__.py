"""What a run of pytest, or two folders of results, come to on one page, in ``summary.json`` and in Markdown.

``data`` holds what is told, ``session`` and ``datasets`` gather it, ``page``, ``summary``, ``picture`` and ``markdown``
tell it. Nothing here measures or decides.
"""
