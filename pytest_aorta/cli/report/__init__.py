"""``aorta report`` and ``aorta comment``: results as a page, and findings as a comment on a pull request.

``pull_request`` reads from CI's environment where to comment, ``comment`` finds, writes and updates the comment,
``hosts`` makes the requests to the APIs of GitHub and GitLab, and ``client`` sends them.
"""
