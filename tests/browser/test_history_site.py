"""The pages of a history in a browser: drawn without errors or requests, in both themes and on narrow screens."""

from __future__ import annotations

import pytest

from pytest_aorta.cli.history.series import case_histories
from pytest_aorta.cli.history.site.write import write_site
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
def site(tmp_path_factory):
    pytest.importorskip("otava", reason="needs pytest-aorta[history]")
    histories = case_histories(make_history(cases=2, commits=40, launches=2))
    return write_site(histories, tmp_path_factory.mktemp("site"), "https://example.org/{commit}")


@pytest.fixture
def page(browser):
    browser.events.clear()
    browser.size(1400, 1000)
    yield browser
    assert browser.complaints == []
    assert browser.requests == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_charts_are_painted_and_the_page_is_not_wider_than_the_screen(page, site, width, dark):
    page.size(width, 1600)
    page.open(site[1], dark=dark)
    page.wait_for(DRAWN)
    assert page.value(COLORED) > 500
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")


def test_index_leads_to_each_case(page, site):
    page.open(site[0])
    assert page.value("document.querySelectorAll('td.test a').length") == 2
    page.open(site[0].parent / page.value("document.querySelector('td.test a').getAttribute('href')"))
    page.wait_for(DRAWN)
    assert page.value("document.querySelector('h1').textContent").startswith("tests/test_training.py::test_step")


def test_changes_link_to_their_commits(page, site):
    page.open(site[1])
    links = page.value("[...document.querySelectorAll('.version a')].map((link) => link.href)")
    assert f"https://example.org/{commit_of(14)}" in links


def test_legend_names_the_newest_version_until_there_is_a_pointer(page, site):
    page.open(site[1])
    page.wait_for(DRAWN)
    values = page.value("[...document.querySelectorAll('figure.plot .u-value')].map((node) => node.textContent)")
    version, median, baseline = values[:3]
    assert version.startswith(f"{commit_of(39)[:7]} 2026-")
    assert float(median) == pytest.approx(float(baseline), rel=0.02)
    assert not {"", "-", "--"} & set(values)


def test_legend_names_the_version_under_the_cursor(page, site):
    page.open(site[1])
    page.wait_for(DRAWN)
    box = page.value(
        "(() => { const over = document.querySelector('figure.plot .u-over'); over.scrollIntoView();"
        "const box = over.getBoundingClientRect(); return [box.left + 2, box.top + 20] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    page.wait_for(f"document.querySelector('figure.plot .u-value').textContent.startsWith('{commit_of(0)[:7]} 2026-')")
