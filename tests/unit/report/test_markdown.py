"""The Markdown of a session: its order, its bounds, and text from tests that must stay text."""

import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pytest_aorta.common.text import printable
from pytest_aorta.report.markdown import (
    MAX_BYTES,
    MAX_COMMENT_BYTES,
    findings,
    headline,
    markdown,
)
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import RETRIED, TestRecord
from pytest_aorta.verdict.verdicts import Note, NoteKind
from tests.unit.builders import (
    CAUGHT,
    IMPROVED,
    INCONCLUSIVE,
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    compared,
    make_facts,
    make_record,
    make_verdict,
    ran,
    replace,
)
from tests.unit.report.elements import Elements

FAILED = make_record(
    "a.py::failed", [make_verdict(REGRESSION, detail="a|b")], outcome="failed", failure="why <b>\n\n# x"
)
GOOD = make_record("a.py::good", [make_verdict(PASS)])
OPEN = make_record("a.py::open", [make_verdict(INCONCLUSIVE)])
CROSS, WARNING, CHECK = "## \N{CROSS MARK} ", "## \N{WARNING SIGN}", "## \N{WHITE HEAVY CHECK MARK} "


def elements(text: str) -> Elements:
    """Return the elements of rendered Markdown."""
    return Elements(MarkdownIt("commonmark").enable("table").render(text))


EXPECTED = {
    "h2",
    "p",
    "strong",
    "details",
    "summary",
    "code",
    "pre",
    "ul",
    "li",
}
ANY = st.text(max_size=60) | st.sampled_from(
    ["</pre>", "</details>", "<!-- x", "```", "@user", "#12", "!7", "a|b\\|c", "\n\n# x", "[a](http://b)", "/close"]
)
TEXTS = st.lists(ANY, min_size=1, max_size=6).map("".join)


def rendered(records, max_bytes=MAX_BYTES, **known) -> str:
    return markdown(findings(records, **known), max_bytes=max_bytes)


def test_failures_come_first_then_inconclusive_and_passed_ones_are_counted():
    text = rendered([GOOD, OPEN, FAILED])
    names = ("1 of 3 tests failed", "a.py::failed", "a.py::open", "<summary><code>a.py::failed")
    places = [text.index(name) for name in names]
    assert places == sorted(places)
    assert "a.py::good" not in text
    assert "1 of 3 tests failed, 1 regression, 1 inconclusive, 1 metric unchanged" in text


@pytest.mark.parametrize(
    ("records", "start"),
    [
        ([GOOD], CHECK + "pytest-aorta: 1 of 1 test passed"),
        ([GOOD, OPEN], WARNING),
        ([GOOD, FAILED], CROSS + "pytest-aorta: 1 of 2 tests failed"),
        ([TestRecord("a", lacked_devices="needs 8 GPUs", outcome="skipped")], WARNING),
        ([], WARNING),
        ([replace(FAILED, outcome=RETRIED), GOOD], WARNING),
        ([make_record("a.py::run", launches=ran(1))], WARNING),
        ([make_record("a.py::caught", [make_verdict(CAUGHT)])], CHECK),
    ],
)
def test_first_line_is_the_verdict_and_only_a_passed_test_is_a_success(records, start):
    assert f"## {headline(findings(records))}".startswith(start)
    assert rendered(records).startswith(start)


@pytest.mark.parametrize("row", [make_verdict(NOT_APPLICABLE), make_verdict(CAUGHT)], ids=str)
def test_verdict_that_does_not_apply_or_that_the_test_expects_is_not_a_finding(row):
    assert not re.search(r"<details>|\*\*", rendered([make_record("a.py::good", [row])]))


@pytest.mark.parametrize("outcome", [REGRESSION, MISSING, INCONCLUSIVE, IMPROVED])
def test_finding_is_a_line_with_its_reason(outcome):
    page = elements(rendered([make_record("a.py::good", [make_verdict(outcome, detail="be<cause")])]))
    (line,) = page.texts["li"]
    assert line.startswith(f"a.py::good: {outcome.value.capitalize()}: ")
    assert "be<cause" in line


EDITED = Note("the learning rate changed: 0.1 -> 0.2", NoteKind.EDIT)


def test_list_has_each_failure_once_by_what_was_edited_and_only_a_screen_is_open():
    rows = (make_verdict(REGRESSION), make_verdict(REGRESSION, metric="weight_hash"))
    failing = tuple(row.metric for row in rows)
    edited = compared(rows[0].case, rows=rows, notes=(EDITED, Note("why")), failing=failing)
    failed = [replace(FAILED, nodeid=f"a.py::{n}", comparisons=(edited,)) for n in range(12)]
    text = rendered([*failed, OPEN])
    lines = elements(text).texts["li"]
    assert f"{EDITED.text} (step_time_p50, weight_hash)" in lines[0]
    assert len(lines) == 13
    assert lines[12].startswith("a.py::open: Inconclusive: step_time_p50")
    head, _, folded = text.partition("<details><summary>3 more</summary>")
    assert (head.count("\n- "), folded.partition("</details>")[0].count("\n- ")) == (10, 3)
    assert len(head.splitlines()) < 20


def test_failure_has_its_evidence_and_the_one_command_that_reproduces_it():
    repeated = ("--aorta-gpus=4", "-o", "aorta_progress=a b")
    evidence, command = elements(
        rendered([replace(FAILED, nodeid="a.py::test_x[$HOME 'q'-1]")], repeated=repeated)
    ).texts["pre"]
    assert evidence == "why <b>\n\n# x"
    assert "- **a.py::failed**: why &lt;b&gt;\n" in rendered([FAILED])
    assert shlex.split(command) == ["pytest", "a.py::test_x[$HOME 'q'-1]", "--aorta-gpus=4", "-o", "aorta_progress=a b"]


@given(TEXTS, TEXTS, TEXTS)
def test_text_of_tests_can_not_change_the_structure(nodeid, failure, reason):
    record = make_record(nodeid, [make_verdict(REGRESSION, detail=reason)], outcome="failed", failure=failure)
    text = rendered([record], command=("pytest", failure), repeated=(nodeid,))
    assert not re.search(r"^\s*/", text, re.MULTILINE)  # a quick action of GitLab
    page = elements(text)
    assert (page.wrong, page.open) == ([], [])
    assert set(page.tags) <= EXPECTED
    assert page.tags.count("details") == 1
    assert page.texts["pre"][0] == "\n".join(printable(line.expandtabs()) for line in failure.splitlines())
    assert (
        page.texts["li"][0]
        .replace("\u200b", "")
        .lstrip("*")
        .startswith(printable(" ".join(nodeid.split())).lstrip("*"))
    )


# What GitHub and GitLab make links of in text without any markup.
LINKED = re.compile(r"@\w|[#!$&]\d|GH-\d|[~%][\w\"]|\w://|\bwww\.|\[\w+:", re.IGNORECASE)
REFERENCES = (
    "@user",
    "a @org/team",
    "mail@host.test",
    "#12",
    "org/repo#12",
    "GH-12",
    "!34",
    "$5",
    "&6",
    "~bug",
    '~"a b"',
    "%v1.0",
    "[issue:7]",
    "https://evil.test/x?a=1",
    "HTTP://evil.test",
    "ftp://evil.test",
    "www.evil.test",
    "x(www.evil.test)",
)


@pytest.mark.parametrize("text", REFERENCES)
def test_references_and_addresses_are_text_wherever_they_stand(text):
    launch = measured(branch=text, environment={"torch": text})
    record = make_record(
        f"a.py::t[{text}]",
        [make_verdict(REGRESSION, detail=text)],
        outcome="failed",
        failure=text,
    )
    record = replace(record, comparisons=(*record.comparisons, compared("a", launch)))
    page = elements(rendered([record], command=("pytest", text), repeated=(text,)))
    assert "a" not in page.tags
    # GitHub and GitLab look for links neither in code nor in preformatted text.
    inert = page.texts["code"] + page.texts["pre"]
    assert any(text in shown for shown in inert)
    open_text = [*page.texts["li"], *page.texts["p"]]
    assert [shown for shown in open_text if LINKED.search(shown)] == []
    assert any(text in shown.replace("\u200b", "") for shown in open_text)
    assert all(any(shown.endswith(code) for code in page.texts["code"]) for shown in page.texts["summary"])


@settings(max_examples=30)
@given(st.integers(0, 400), st.integers(600, 20_000))
def test_markdown_is_never_longer_than_allowed_and_counts_what_is_dropped(tests, limit):
    records = [make_record(f"a.py::\N{BUG}{n}", [make_verdict(REGRESSION)]) for n in range(tests)]
    text = rendered(records, max_bytes=limit)
    assert len(text.encode()) <= limit
    shown = text.count("\N{BUG}")
    assert shown == tests or f"\n... and {tests - shown} more findings\n" in text


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(0, 30_000), st.integers(2_000, MAX_COMMENT_BYTES))
def test_failures_of_any_length_are_bounded_counted_and_closed(tests, length, limit):
    failed = [replace(FAILED, nodeid=f"a.py::{n}", comparisons=(), failure="<" * length) for n in range(tests)]
    text = rendered(failed, command=("pytest", "x" * length), max_bytes=limit)
    assert len(text.encode()) <= limit
    page = elements(text)
    assert (page.wrong, page.open) == ([], [])
    shown = text.count("<summary><code>")
    assert shown == tests or f"\n... and {tests - shown} more failures\n" in text


def measured(**changes) -> LaunchFacts:
    cpu = {"torch": "2.13.0", "device": "cpu"}
    known = {"commit": "c0ffee00" * 5, "branch": "main", "dirty": True, "environment": cpu}
    return make_facts(**(known | changes))


def test_provenance_that_would_push_findings_out_is_left_out():
    record = replace(FAILED, comparisons=(compared("a", measured(branch="x" * 3_000)),))
    text = rendered([record], max_bytes=2_000)
    assert len(text.encode()) <= 2_000
    assert "Measured:" not in text
    assert "a.py::failed" in text
