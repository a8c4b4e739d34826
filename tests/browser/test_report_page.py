"""The page in a browser: opens without errors, sorts, filters and zooms, by mouse and by keys."""

from __future__ import annotations

import pytest

from pytest_aorta.report.from_session import session_report
from pytest_aorta.report.write import write_report
from tests.unit.sample_run import make_run

ROWS = "[...document.querySelectorAll('#verdicts tbody tr')].filter((row) => !row.hidden)"
STEPS = "#test-0 figure[data-kind=steps]"
DRAWN = "document.querySelectorAll('#test-0 figure .uplot').length === 3"


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = make_run(folder, tests=8, ranks=4, steps=200)
    return write_report(session_report(records, title="made up"), folder / "page.html")[0]


@pytest.fixture
def page(browser, report_file):
    browser.events.clear()
    browser.size(1400, 1000)
    browser.open(report_file)
    browser.value("document.getElementById('test-0').scrollIntoView()")
    browser.wait_for(DRAWN)
    yield browser
    assert browser.complaints == []
    assert browser.requests == []


def cells(page, column: int) -> list[str]:
    return page.value(f"{ROWS}.map((row) => row.cells[{column}].dataset.sort ?? row.cells[{column}].textContent)")


def sort_by(page, column: int) -> str:
    page.value(f"document.querySelectorAll('#verdicts thead button')[{column}].click()")
    return page.value(f"document.querySelectorAll('#verdicts thead th')[{column}].getAttribute('aria-sort')")


def shown_steps(page) -> list[float]:
    """Return the first and the last step that the plot shows."""
    return page.value(f"document.querySelector('{STEPS}').dataset.range.split(' ').map(Number)")


def center(page, selector: str, x: float = 0.5) -> tuple[float, float]:
    box = page.value(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        f"return [box.left + {x} * box.width, box.top + box.height / 2] }})()"
    )
    return box[0], box[1]


def test_page_opens_with_failed_tests_open_and_their_plots_drawn(page):
    assert page.value("document.querySelectorAll('details.test-entry[open]').length") == 3
    assert "step_time_p50: regression: " in page.value("document.querySelector('#test-0 pre').textContent")
    painted = page.value(
        f"(() => {{ const canvas = document.querySelector('{STEPS} canvas');"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return data.some((value, place) => place % 4 === 3 && value > 0) })()"
    )
    assert painted


@pytest.mark.parametrize("column", [2, 4])
def test_numbers_sort_as_numbers_and_empty_cells_stay_last(page, column):
    assert sort_by(page, column) == "ascending"
    values = [float(text) for text in cells(page, column) if text]
    assert values == sorted(values)
    assert sort_by(page, column) == "descending"
    texts = cells(page, column)
    values = [float(text) for text in texts if text]
    assert values == sorted(values, reverse=True)
    assert texts[: len(values)] == [text for text in texts if text]


def test_names_sort_as_text(page):
    sort_by(page, 0)
    assert cells(page, 0) == sorted(cells(page, 0))


def test_filters_by_text_and_verdict_count_the_rows_left(page):
    everything = page.value(f"{ROWS}.length")
    page.value("(() => { const box = document.getElementById('filter'); box.focus(); box.value = ''; })()")
    for key in "llama p50":
        page.press(key)
    assert set(cells(page, 1)) == {"step_time_p50"}
    assert all("llama" in name for name in cells(page, 0))
    page.value("document.querySelector('input.outcome[value=inconclusive]').click()")
    left = page.value(f"{ROWS}.length")
    assert 0 < left < everything
    assert page.value("document.getElementById('count').textContent") == f"{left} of {everything} verdicts"


def test_dragging_buttons_and_keys_zoom_into_the_steps(page):
    assert shown_steps(page) == [1, 200]
    page.drag(center(page, f"{STEPS} .u-over", 0.25), center(page, f"{STEPS} .u-over", 0.5))
    first, last = shown_steps(page)
    assert (first, last) == pytest.approx((51, 100), abs=3)
    page.value(f"document.querySelector('{STEPS} .tools button[title=\"Show all\"]').click()")
    assert shown_steps(page) == [1, 200]
    page.value(f"document.querySelector('{STEPS} .canvas').focus()")
    page.press("+")
    page.press("ArrowRight")
    first, last = shown_steps(page)
    assert last - first == pytest.approx(199 / 2)
    assert first > 50
    page.press("0")
    assert shown_steps(page) == [1, 200]


def test_chosen_launch_is_drawn(page):
    select = f"document.querySelector('{STEPS} select')"
    assert page.value(f"[...{select}.options].map((option) => option.text)") == [f"candidate {n}" for n in (1, 2, 3)]
    page.value(f"{select}.value = 2; {select}.dispatchEvent(new Event('change'))")
    assert page.value(f"document.querySelectorAll('{STEPS} .uplot').length") == 1
    assert page.value(f"{select}.value") == "2"


def test_timeline_names_the_interval_under_the_pointer(page):
    lanes = "#test-0 figure[data-kind=timeline]"
    page.value(f"document.querySelector('{lanes}').scrollIntoView()")
    x, y = center(page, f"{lanes} .u-over")
    for down in range(-40, 40, 4):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + down)
        if text := page.value(f"document.querySelector('{lanes} .hint:not([hidden])')?.textContent"):
            assert text.startswith("rank ")
            assert text.endswith(" ms)")
            return
    pytest.fail("there was nothing under the pointer")


def test_link_of_a_row_opens_its_test(page):
    page.value("document.getElementById('close-all').click()")
    page.value("document.querySelector('#verdicts tbody a').click()")
    page.wait_for("document.querySelector('details.test-entry[open]') !== null")
    assert page.value("document.activeElement.closest('details').open")


def test_theme_follows_the_system_until_a_reader_chooses_another(page):
    def back() -> str:
        return page.value("getComputedStyle(document.body).backgroundColor")

    light = back()
    page.use_theme(dark=True)
    page.wait_for("document.documentElement.dataset.theme === 'dark'")
    dark = back()
    assert dark != light
    page.value("document.getElementById('theme').click()")
    assert (page.value("document.getElementById('theme').textContent"), back()) == ("Theme: light", light)
    page.value("document.getElementById('theme').click(); document.getElementById('theme').click()")
    assert (page.value("document.getElementById('theme').textContent"), back()) == ("Theme: system", dark)
    page.wait_for(DRAWN)


# Of WCAG 2.1: relative luminance, and 4.5 to 1 for text (https://www.w3.org/TR/WCAG21/#contrast-minimum).
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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(page, report_file, dark):
    page.open(report_file, dark=dark)
    page.value("document.getElementById('open-all').click()")
    assert page.value(CONTRAST) == []


def test_every_control_has_a_name_and_is_reached_by_keys(page):
    nameless = page.value(
        "[...document.querySelectorAll('button, select, input, [tabindex]')].filter((node) =>"
        "!(node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length)).length"
    )
    assert nameless == 0
    assert page.value("[...document.querySelectorAll('button, select, .canvas')].every((node) => node.tabIndex === 0)")


def test_page_fits_a_narrow_window(page):
    page.size(420, 900)
    page.wait_for("document.documentElement.scrollWidth <= 420")
