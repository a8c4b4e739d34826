"""A headless Chromium for tests, which are skipped where no Chromium is installed."""

from __future__ import annotations

import pytest

from tests.browser.chromium import NAMES, find_chromium, open_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip(f"needs chromium: there is none of {', '.join(NAMES)}")
    with open_browser(program, tmp_path_factory.mktemp("profile")) as page:
        yield page
