"""The page, the Markdown and the properties as text: input stays escaped, and sizes stay bounded."""

import json
import os
import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.report.data import Case, Launch, Report, session_report
from pytest_aorta.report.page.render import render
from pytest_aorta.report.write import write_report, write_session_reports
from pytest_aorta.session.record import LaunchNote, TestRecord, properties
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import (
    compared,
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
from tests.unit.sample_run import make_run

EVIL = "a.py::test[</script><script>alert(1)</script>|`*_\"'&amp;]"


class Reader(HTMLParser):
    """The tags, the text of each kind of tag, and the targets of all attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open.append(tag)
        self.targets += [value for name, value in attributes if name in ("src", "href", "action", "srcset")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data


def as_report(nodeid: str, **changes) -> Report:
    result = make_result([[10.0, 11.0], [10.0, 12.0]], environment={"torch": EVIL}, config={EVIL: EVIL})
    case = Case(EVIL, (make_verdict(Outcome.REGRESSION, detail=EVIL),), (Launch(1, result, result.facts),))
    launches = (LaunchNote(has_result=True, traces=(EVIL,)),)
    test = make_test(nodeid, "failed", case, **({"failure": EVIL, "launches": launches} | changes))
    return replace(make_report(test, warnings=(EVIL,)), title=EVIL)


def test_text_of_a_test_stays_text_wherever_it_is_shown():
    page = Reader(render(as_report(EVIL)))
    assert len(page.scripts) == 3
    assert page.text.count("alert(1)") >= 8
    assert all("alert(1)" not in script for script in page.scripts[1:])
    json.loads(page.scripts[0])


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_any_name_is_shown_as_it_is_and_makes_no_tag(name):
    page, plain = Reader(render(as_report(name))), Reader(render(as_report("a")))
    assert [tag for tag in page.tags if tag != "wbr"] == [tag for tag in plain.tags if tag != "wbr"]


def test_page_points_to_nothing_outside_of_itself():
    page = render(as_report("a.py::test_b"))
    assert [target for target in Reader(page).targets if not target.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in page
    assert not re.search(r"url\(|@import", page)


def test_run_of_eight_ranks_is_small_and_has_its_summary_and_timeline_beside_it(tmp_path):
    report = session_report(make_run(tmp_path, tests=3, ranks=8, steps=300), title="run")
    page, table, picture = write_report(report, tmp_path / "made" / "page.html")
    assert page.stat().st_size < 500_000
    assert json.loads(table.read_text())["candidate"] == "candidate"
    assert (table.name, picture.name) == ("summary.json", "candidate_timeline.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


# The reports of a session

GOOD = make_record("a.py::good", [make_verdict(Outcome.PASS)])


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
    row = make_verdict(Outcome.PASS)
    comparison = compared("case", make_facts(final_loss=1.5), rows=(row,))
    found = properties(TestRecord("a", comparisons=(comparison,), launches=ran(3)))
    assert found[:2] == [("aorta.launches", 3), ("aorta.step_time_p50", str(row))]
    assert {("aorta.step_time_p50.value", 10.0), ("aorta.final_loss.value", 1.5)} <= set(found)
    assert found[-2:] == [("aorta.step_time_p50.verdict", "pass"), ("aorta.step_time_p50.baseline", 1.0)]


def test_properties_of_two_comparisons_say_which_they_are_of():
    comparisons = (compared("a::x", make_facts(final_loss=1.0)), compared("a::y", make_facts(final_loss=2.0)))
    found = properties(TestRecord("a", comparisons=comparisons))
    assert {("aorta.x.final_loss.value", 1.0), ("aorta.y.final_loss.value", 2.0)} <= set(found)
