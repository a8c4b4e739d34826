"""The page of a history in a browser: drawn without errors or requests, in both themes and on narrow screens."""

import pytest

from pytest_aorta.cli.history import case_histories, render
from tests.unit.sample_history import commit_of, make_history

DRAWN = "document.querySelectorAll('figure.plot[data-drawn] .uplot').length >= 2"
# Pixels of the first chart that are neither transparent nor white nor black.
COLORED = """
(() => {
  const canvas = document.querySelector('figure.plot canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at + 3] > 0 && data[at] !== data[at + 2];
  return count;
})()
"""


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    pytest.importorskip("otava", reason="needs pytest-aorta[history]")
    histories = case_histories(make_history(cases=2, commits=40, launches=2))
    file = tmp_path_factory.mktemp("history") / "page.html"
    file.write_text(render(histories), encoding="utf-8")
    return file


@pytest.fixture
def page(browser):
    browser.events.clear()
    browser.size(1400, 1000)
    yield browser
    assert browser.complaints == []
    assert browser.requests == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_charts_are_painted_and_the_page_is_not_wider_than_the_screen(page, history, width, dark):
    page.size(width, 1600)
    page.open(history, dark=dark)
    page.wait_for(DRAWN)
    assert page.value(COLORED) > 500
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")


def test_legend_names_the_version_under_the_cursor(page, history):
    page.open(history)
    page.wait_for(DRAWN)
    box = page.value(
        "(() => { const over = document.querySelector('figure.plot .u-over'); over.scrollIntoView();"
        "const box = over.getBoundingClientRect(); return [box.left + 2, box.top + 20] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    page.wait_for(f"document.querySelector('figure.plot .u-value').textContent.startsWith('{commit_of(0)[:7]} 2026-')")
