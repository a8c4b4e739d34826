"""The page, the Markdown and the properties as text: input stays escaped, and sizes stay bounded."""

import json
import os
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.report.data import Report, session_report
from pytest_aorta.report.page.render import render
from pytest_aorta.report.write import write_report, write_session_reports
from pytest_aorta.session.record import LaunchNote, TestRecord, properties
from tests.unit.builders import (
    PASS,
    REGRESSION,
    compared,
    make_case,
    make_facts,
    make_options,
    make_record,
    make_report,
    make_result,
    make_test,
    make_verdict,
    ran,
    replace,
)
from tests.unit.report.elements import Elements
from tests.unit.sample_run import make_run

EVIL = "a.py::test[</script><script>alert(1)</script>|`*_\"'&amp;]"


def as_report(nodeid: str, **changes) -> Report:
    result = make_result([[10.0, 11.0], [10.0, 12.0]], environment={"torch": EVIL}, config={EVIL: EVIL})
    case = make_case(make_verdict(REGRESSION, detail=EVIL), launches=[(result, result.facts)], name=EVIL)
    launches = (LaunchNote(has_result=True, traces=(EVIL,)),)
    test = make_test(nodeid, "failed", case, **({"failure": EVIL, "launches": launches} | changes))
    return replace(make_report(test, warnings=(EVIL,)), title=EVIL)


def test_text_of_a_test_stays_text_wherever_it_is_shown():
    page = Elements(render(as_report(EVIL)))
    data, *scripts = page.texts["script"]
    assert page.wrong == []
    assert len(scripts) == 2
    assert page.texts["main"][0].count("alert(1)") >= 8
    assert not any("alert(1)" in script for script in scripts)
    json.loads(data)


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_any_name_is_shown_as_it_is_and_makes_no_tag(name):
    page, plain = Elements(render(as_report(name))), Elements(render(as_report("a")))
    assert [tag for tag in page.tags if tag != "wbr"] == [tag for tag in plain.tags if tag != "wbr"]


def test_page_points_to_nothing_outside_of_itself():
    page = render(as_report("a.py::test_b"))
    assert [target for target in Elements(page).targets if not target.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in page
    assert not re.search(r"url\(|@import", page)


def test_page_of_a_run_of_eight_ranks_is_small(tmp_path):
    report = session_report(make_run(tmp_path, tests=3, ranks=8, steps=300), title="run")
    assert write_report(report, tmp_path / "made" / "page.html").stat().st_size < 500_000


# The reports of a session

GOOD = make_record("a.py::good", [make_verdict(PASS)])


def test_summary_is_appended_to_what_is_there(tmp_path, monkeypatch):
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    assert write_session_reports([GOOD], make_options()) == ([], True)
    assert file.read_text().startswith("before\n## ")
    os.mkfifo(fifo := tmp_path / "fifo")  # which nobody reads
    for unfit in (tmp_path, fifo):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(unfit))
        (line,), good = write_session_reports([GOOD], make_options())
        assert line.startswith("WARNING: GITHUB_STEP_SUMMARY")
        assert good  # no option asks for this file


# JUnit


def test_properties_have_every_measured_metric_and_its_verdict():
    row = make_verdict(PASS)
    comparison = compared("case", make_facts(final_loss=1.5), rows=(row,))
    found = properties(TestRecord("a", comparisons=(comparison,), launches=ran(3)))
    assert found[:2] == [("aorta.launches", 3), ("aorta.step_time_p50", str(row))]
    assert {("aorta.step_time_p50.value", 10.0), ("aorta.final_loss.value", 1.5)} <= set(found)
    assert found[-2:] == [("aorta.step_time_p50.verdict", "pass"), ("aorta.step_time_p50.baseline", 1.0)]
