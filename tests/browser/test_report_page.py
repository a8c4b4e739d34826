"""The page in a browser: opens without errors, groups, sorts, filters and zooms, by mouse and by keys."""

import pytest

from pytest_aorta.report.data import session_report
from pytest_aorta.report.write import write_report
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, NoteKind
from tests.browser.report_page import DRAWN, STEPS, entry, texts
from tests.unit.builders import CAUGHT, compared, make_record, make_verdict

SHOWN = "[...document.querySelectorAll('details.test-entry')].filter((entry) => !entry.hidden)"
VISIBLE_ROWS = "[...document.querySelectorAll('.verdicts tbody tr')].filter((row) => !row.closest('[hidden]'))"


def names(page) -> list[str]:
    return page.value(f"{SHOWN}.map((entry) => entry.dataset.name)")


def choose(page, selector: str, value: str) -> None:
    page.value(
        f"(() => {{ const list = document.querySelector('{selector}'); list.value = '{value}';"
        "list.dispatchEvent(new Event('change')) })()"
    )


def type_into_filter(page, text: str) -> None:
    page.value("(() => { const box = document.getElementById('filter'); box.focus(); box.value = ''; })()")
    for key in text:
        page.press(key)


def shown_steps(page) -> list[float]:
    """Return the first and the last step that the plot shows."""
    return page.value(f"document.querySelector('{STEPS}').dataset.range.split(' ').map(Number)")


def center(page, selector: str, x: float = 0.5) -> tuple[float, float]:
    box = page.value(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        f"return [box.left + {x} * box.width, box.top + box.height / 2] }})()"
    )
    return box[0], box[1]


def test_opened_test_has_its_evidence_and_its_plots_drawn(page):
    assert "Regression: step_time_p50 " in page.value("document.querySelector('#test-0 pre').textContent")
    painted = page.value(
        f"(() => {{ const canvas = document.querySelector('{STEPS} canvas');"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return data.some((value, place) => place % 4 === 3 && value > 0) })()"
    )
    assert painted


def test_metrics_that_are_not_applicable_are_collapsed_until_asked_for(page):
    skipped = f"{entry('on_cpu')} details.skipped"
    page.value(f"document.querySelector('{entry('on_cpu')}').open = true")
    assert texts(page, f"{entry('on_cpu')} .case > table.verdicts tbody .badge") == ["pass"] * 3
    assert page.value(f"document.querySelector('{skipped}').open") is False
    assert page.value(f"document.querySelector('{skipped} table').checkVisibility()") is False
    assert texts(page, f"{skipped} summary")[0].startswith("1 not applicable step_time_p10")
    page.value(f"document.querySelector('{skipped} summary').focus()")
    page.press(" ")
    page.wait_for(f"document.querySelector('{skipped} table').checkVisibility()")
    assert texts(page, f"{skipped} .badge") == ["not applicable"]
    assert "CPU ranks" in texts(page, f"{skipped} .reason")[0]


def test_failed_launches_and_failures_before_a_launch_are_counted(page):
    assert "1 test failed before a launch" in texts(page, "#summary")[0]
    assert "1 failed launch" in texts(page, f"{entry('late_rank')} summary")[0]
    assert "failed before a launch" in texts(page, f"{entry('misspelled')} summary")[0]


def legend(page, figure: str) -> dict[str, str]:
    """Return the shown entries of a legend, name -> value."""
    rows = page.value(
        f"[...document.querySelectorAll('{figure} .u-legend .u-series')].filter((row) => row.checkVisibility())"
        ".map((row) => [row.querySelector('.u-label').textContent, row.querySelector('.u-value').textContent])"
    )
    return {name.rstrip(":"): value for name, value in rows}


def test_legend_has_a_value_for_each_name_before_a_pointer_is_there(page):
    found = legend(page, "#test-0 figure[data-kind=steps]")
    assert len(found) >= 5
    assert all(name and value.strip(" -") for name, value in found.items()), found
    numbers = list(found.values())[1:]
    assert all(15 < float(value) < 25 for value in numbers), found


def draw(page, figure: str) -> None:
    """Open the test of a figure, and scroll to the figure."""
    page.value(f"document.querySelector('{figure}').closest('details').open = true")
    page.value(f"document.querySelector('{figure}').scrollIntoView()")
    page.wait_for(f"document.querySelector('{figure} .uplot') !== null")


def test_reference_of_an_ab_and_the_stored_baseline_are_told_apart(page):
    figure = f"{entry('compiled')} figure[data-kind=steps]"
    draw(page, figure)
    assert {"A/B reference origin/main p50", "stored baseline\xa01 p50"} <= set(legend(page, figure))
    looks = page.value(
        f"Object.fromEntries([...document.querySelectorAll('{figure} .u-legend .u-series')].map((row) => "
        "[row.querySelector('.u-label').textContent.split(/[ ,]/)[0], "
        "getComputedStyle(row.querySelector('.u-marker')).borderTopStyle]))"
    )
    assert (looks["A/B"], looks["stored"]) == ("dotted", "dashed")
    sides = set(texts(page, f"{entry('compiled')} .side"))
    assert sides == {"A/B reference origin/main", "stored baseline\xa01"}


def test_times_that_are_far_apart_have_a_logarithmic_axis_and_others_a_linear_one(page):
    figure = f"{entry('compiled')} figure[data-kind=steps]"
    draw(page, figure)
    scales = [page.value(f"document.querySelector('{one}').dataset.scale") for one in (figure, STEPS)]
    assert scales == ["logarithmic", "linear"]


def test_sorting_reorders_the_tests(page):
    assert names(page)[0].endswith("test_fsdp_overlap[comm_stream]")
    choose(page, "#sort", "name")
    assert names(page) == sorted(names(page))
    choose(page, "#sort", "place")
    assert names(page)[-1].endswith("test_16_gpus")
    choose(page, "#sort", "worst")
    assert names(page)[0].endswith("test_fsdp_overlap[comm_stream]")


def test_filters_by_text_and_verdict_leave_the_tests_with_a_row(page):
    type_into_filter(page, "llama p50")
    assert all("llama" in name for name in names(page))
    assert set(page.value(f"{VISIBLE_ROWS}.map((row) => row.dataset.metric)")) == {"step_time_p50"}
    rows = page.value(f"{VISIBLE_ROWS}.length")
    page.value("document.querySelector('input.outcome[value=inconclusive]').click()")
    left = page.value(f"{VISIBLE_ROWS}.length")
    assert 0 < left < rows
    shown = len(names(page))
    total = page.value("document.querySelectorAll('tr[data-outcome]').length")
    count = page.value("document.getElementById('count').textContent")
    assert count == f"{shown} of 13 tests, {left} of {total} verdicts"


def test_filter_finds_a_test_without_verdicts_by_its_name(page):
    type_into_filter(page, "misspelled")
    assert names(page) == ["tests/test_llama.py::test_misspelled"]


def test_only_failed_tests_are_left_on_request(page):
    page.value("document.getElementById('only-failed').click()")
    assert page.value(f"{SHOWN}.map((entry) => entry.dataset.failed)") == ["yes"] * 6


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


def test_buttons_open_and_close_the_tests_that_are_shown(page):
    page.value("document.getElementById('close-all').click()")
    assert page.value("document.querySelectorAll('details.test-entry[open]').length") == 0
    type_into_filter(page, "ranking")
    page.value("document.getElementById('open-all').click()")
    opened = page.value("[...document.querySelectorAll('details.test-entry[open]')].map((entry) => entry.dataset.name)")
    assert opened == ["tests/test_ranking.py::test_four_streams"]


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


def test_page_of_200_tests_lists_the_failures_first_and_is_filtered_at_once(browser, tmp_path):
    rows = [make_verdict(Outcome.PASS, metric=name) for name in METRICS]
    tests = [make_record(f"a.py::test_{n}", rows) for n in range(170)]
    wrong = [make_verdict(Outcome.REGRESSION, delta=0.1), *rows[1:]]
    tests += [make_record(f"b.py::test_{n}", wrong, outcome="failed") for n in range(30)]
    browser.events.clear()
    browser.size(1400, 1000)
    browser.open(write_report(session_report(tests, title="many"), tmp_path / "page.html"))
    assert names(browser)[:30] == [f"b.py::test_{n}" for n in range(30)]
    assert browser.value("document.querySelectorAll('details.test-entry[open]').length") == 0
    took_ms = browser.value(
        "(() => { const box = document.getElementById('filter'); box.value = 'test_17 p99';"
        "const begin = performance.now(); box.dispatchEvent(new Event('input')); return performance.now() - begin })()"
    )
    assert names(browser) == ["b.py::test_17", "a.py::test_17"]
    assert took_ms < 5_000
    assert browser.complaints == []


def test_only_failed_test_is_open_and_begins_with_what_was_edited(browser, tmp_path):
    edited = Note("the learning rate changed: 0.1 -> 0.2 from step 1", NoteKind.EDIT)
    rows = (make_verdict(Outcome.REGRESSION, delta=0.1),)
    comparison = compared(rows[0].case, rows=rows, notes=(edited,), failing=("step_time_p50",))
    failure = f"{edited}\nRegression: step_time_p50"
    record = make_record("a.py::test_b", outcome="failed", failure=failure, comparisons=(comparison,))
    browser.open(write_report(session_report([record], title="edited"), tmp_path / "page.html"))
    assert texts(browser, "details.test-entry[open] .said") == [str(edited)]
    assert texts(browser, "pre.evidence") == ["Regression: step_time_p50"]
    assert browser.value("document.body.innerText").count(str(edited)) == 1


def test_expected_regression_is_counted_apart_and_filtered_by_its_own_box(browser, tmp_path):
    expected = make_verdict(CAUGHT, delta=0.5)
    records = [make_record("a.py::test_planted", [expected])]
    browser.open(write_report(session_report(records, title="planted"), tmp_path / "page.html"))
    assert texts(browser, ".totals .badge") == ["1 passed", "1 expected regression"]
    assert names(browser) == ["a.py::test_planted"]
    browser.value("document.querySelector('input.outcome[value=\"expected regression\"]').click()")
    assert names(browser) == []
