"""The page in narrow and wide windows and in both themes: contrast, headings, tables, and nothing cut off."""

import itertools

import pytest

from tests.browser.report_page import DRAWN, OPENED
from tests.unit.builders import each_of

# The rules of WCAG 2.1: relative luminance, and 4.5 to 1 for text (https://www.w3.org/TR/WCAG21/#contrast-minimum).
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const back = parse(getComputedStyle(node).backgroundColor);
      if (back.length < 4 || back[3] === 1) return back;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest('script')) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(`${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`);
  }
  return [...new Set(weak)];
})()
"""


@each_of("dark", {"light": False, "dark": True})
def test_all_text_has_enough_contrast(page, report_file, dark):
    page.open(report_file, dark=dark)
    page.value(OPENED)
    assert page.value(CONTRAST) == []


def test_every_control_has_a_name_and_is_reached_by_keys(page):
    nameless = page.value(
        "[...document.querySelectorAll('button, select, input, [tabindex]')].filter((node) =>"
        "!(node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length)).length"
    )
    assert nameless == 0
    assert page.value("[...document.querySelectorAll('button, select, .canvas')].every((node) => node.tabIndex === 0)")


@each_of("dark", {"light": False, "dark": True})
@pytest.mark.parametrize("width", [390, 1440])
def test_opened_page_is_not_wider_than_the_window(page, report_file, width, dark):
    page.size(width, 6000)
    page.open(report_file, dark=dark)
    page.value(OPENED)
    page.value("document.getElementById('test-0').scrollIntoView()")
    page.wait_for(DRAWN)
    assert page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert page.value("document.documentElement.scrollWidth") <= width
    # Only these may scroll sideways; anything else that is too wide would be cut off.
    beyond = page.value(
        "[...document.querySelectorAll('main *')]"
        ".filter((node) => node.checkVisibility() && !node.closest('.uplot, .unseen')"
        f" && node.getBoundingClientRect().right > {width}).map((node) => `${{node.tagName}}.${{node.className}}`)"
    )
    assert beyond == []


def test_headings_do_not_skip_a_level(page):
    levels = page.value(
        "[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map((node) => Number(node.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_table_names_its_rows_and_columns(page):
    nameless = page.value(
        "[...document.querySelectorAll('table:not(.u-legend)')].filter((table) =>"
        "![...table.rows].every((row) => row.querySelector('th[scope]'))"
        "|| [...table.querySelectorAll('thead th')].some((head) => !head.textContent.trim())).length"
    )
    assert nameless == 0
