"""What a package index shows: the README, whose links have to work there, and the addresses of the project.

Both need the repository's address: ``REPOSITORY_URL=https://... python -m build``. Without it, links stay relative.
"""

import os
import re
from pathlib import Path

from setuptools import setup

PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
# A picture is linked as a raw file, anything else as a page.
LINK = re.compile(r"(?P<text>(?P<picture>!?)\[[^\]]*\])\((?!https?:)(?P<path>[^)]+)\)")

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
urls = {}
if repository := os.environ.get("REPOSITORY_URL"):
    readme = LINK.sub(
        lambda link: f"{link['text']}({repository}/{'raw' if link['picture'] else 'blob'}/HEAD/{link['path']})", readme
    )
    urls = {"Repository": repository} | {name: f"{repository}/blob/HEAD/{path}" for name, path in PAGES.items()}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
