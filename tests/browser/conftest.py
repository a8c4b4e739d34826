"""A headless Chromium for tests, which are skipped if no Chromium is installed."""

import pytest

from pytest_aorta.report.data import session_report
from pytest_aorta.report.write import write_report
from tests.browser.chromium import NAMES, find_chromium, open_browser
from tests.browser.report_page import DRAWN, STEPS
from tests.unit.sample_run import make_run, make_varied_run


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip(f"needs chromium: there is none of {', '.join(NAMES)}")
    with open_browser(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="session")
def report_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = [*make_run(folder, tests=8, ranks=4, steps=200), *make_varied_run(folder)]
    return write_report(session_report(records, title="made up"), folder / "page.html")


@pytest.fixture
def page(browser, report_file):
    browser.events.clear()
    browser.size(1400, 1000)
    browser.open(report_file)
    browser.value("document.getElementById('test-0').open = true")
    browser.value(f"document.querySelector('{STEPS}').scrollIntoView()")
    browser.wait_for(DRAWN)
    yield browser
    assert browser.complaints == []
    assert browser.requests == []
