"""Renders a session as Markdown, for a comment on a pull request and for GitHub's page of a job.

The first line is the verdict. A list follows of what failed and of the other findings, of which a screen is open, then
the evidence of each failure with the command that repeats it, and the provenance of the launches. Text from tests is
escaped, so that it neither changes the structure nor mentions a user, links an issue or an address, or runs a quick
action of GitLab.
"""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from pytest_aorta.common.model import Commit, Count, Model
from pytest_aorta.common.text import brief, counted, printable
from pytest_aorta.report.provenance import provenance_values
from pytest_aorta.session.record import Side, TestRecord, caught_text, finding_text, num_caught, totals
from pytest_aorta.session.rounds import Repeated
from pytest_aorta.verdict.verdicts import FINDINGS

# GitHub drops the whole summary of a step above 1 MiB, and other programs may write to the same file.
MAX_BYTES = 512 << 10
# GitHub refuses comments of more than 65,536 characters; CI adds a link.
MAX_COMMENT_BYTES = 60_000
_MAX_EVIDENCE = 8_000
_MAX_FAILURES = 20
_MAX_VALUE = 2_000
_MAX_FINDINGS = 2_000
# Lines of the list that are not folded, and characters of each.
_MAX_OPEN, _MAX_LINE = 10, 300
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")
# What GitHub and GitLab make links of: users, issues, labels, milestones and addresses. They look for them in the
# rendered text, so a backslash does not prevent a link.
_LINKED = re.compile(r"""@|:(?=//)|www(?=\.)|(?:\\[#!$~]|%|&amp;)(?=[\w"])|\bGH\\-(?=\d)|\\\[(?=\w+:)""", re.IGNORECASE)
_ZERO_WIDTH_SPACE = "&#8203;"
# GitLab runs a line that starts with a slash, such as /close, as a command.
_SLASH = "&#47;"
_FAILED, _WARNING, _PASSED = "\N{CROSS MARK}", "\N{WARNING SIGN}\N{VARIATION SELECTOR-16}", "\N{WHITE HEAVY CHECK MARK}"


_Value: TypeAlias = Annotated[str, Meta(max_length=_MAX_VALUE)]
_Evidence: TypeAlias = Annotated[str, Meta(max_length=_MAX_EVIDENCE)]


class _Finding(Model, frozen=True):
    """A line on a test: the reason of its failure, or a finding that no failure contains."""

    test: _Value
    text: _Value


class _Failure(Model, frozen=True):
    """A failed test: the beginning of its failure, the length of the whole in characters, and what repeats it."""

    reason: _Finding
    text: _Evidence
    length: Count
    command: _Evidence


class Findings(Model, frozen=True):
    """All that the Markdown of a session shows.

    Attributes:
        schema_version: Version of the file.
        commit: The commit that is checked out; None if git gives no answer.
        tests, passed, failed: Numbers of tests; a retried attempt is not a test.
        caught: Number of regressions that tests have caught.
        undecided: Number of tests with an inconclusive verdict.
        not_compared: Number of tests that launched and compared nothing.
        retried: Number of attempts that were retried.
        ended_by: What ended the run before all tests had run, such as Ctrl-C; empty if nothing did.
        totals: One line that counts verdicts and launches.
        num_findings: Number of other findings, of which ``findings`` has the first, the worst first.
        failures: The first failed tests.
        provenance: Label -> values of the launches under test.
    """

    schema_version: Literal[1]
    commit: Commit | None
    tests: Count
    passed: Count
    failed: Count
    caught: Count
    undecided: Count
    not_compared: Count
    retried: Count
    ended_by: _Value
    totals: _Value
    num_findings: Count
    findings: Annotated[tuple[_Finding, ...], Meta(max_length=_MAX_FINDINGS)]
    failures: Annotated[tuple[_Failure, ...], Meta(max_length=_MAX_FAILURES)]
    provenance: Annotated[dict[_Value, _Value], Meta(max_length=16)]


def findings(
    records: Sequence[TestRecord],
    *,
    commit: str | None = None,
    command: Sequence[str] = (),
    argument_of: Callable[[str], str] = str,
    repeated: Sequence[str] = (),
    ended_by: str = "",
) -> Findings:
    """Return what the Markdown of a session shows.

    Args:
        records: The records of all tests.
        commit: The commit that is checked out.
        command: Words of the command line, for the provenance.
        argument_of: Returns the argument that names a test to pytest, of its node id.
        repeated: Words that repeat the run's options in the command that reproduces a failure.
        ended_by: As in :class:`Findings`.
    """
    final = [record for record in records if not record.is_retried]
    groups = [(record, rows) for record in records for rows in record.unshown_findings]
    groups.sort(key=lambda group: FINDINGS.index(group[1][0].outcome))
    return Findings(
        schema_version=1,
        commit=commit,
        tests=len(final),
        passed=sum(record.outcome == "passed" for record in final),
        failed=sum(record.has_failed for record in final),
        caught=num_caught(final),
        undecided=sum(record.is_undecided for record in final),
        not_compared=sum(record.compared_nothing for record in final),
        retried=len(records) - len(final),
        ended_by=_cut(ended_by),
        totals=_cut(totals(records)) if records or not ended_by else "",
        num_findings=len(groups),
        findings=tuple(_line_on(record, finding_text(rows), rows[0].case) for record, rows in groups[:_MAX_FINDINGS]),
        failures=tuple(
            _Failure(
                _line_on(record, record.reason),
                _unicode(record.failure[:_MAX_EVIDENCE])[:_MAX_EVIDENCE],
                len(record.failure),
                _cut(Repeated(argument_of(record.nodeid), repeated).command(), _MAX_EVIDENCE),
            )
            for record in [record for record in records if record.has_failed][:_MAX_FAILURES]
        ),
        provenance=_provenance(records, command),
    )


def markdown(found: Findings, *, max_bytes: int = MAX_BYTES, conclusion: str = "success", notice: str = "") -> str:
    """Return the Markdown of a session in at most ``max_bytes`` of UTF-8; parts that do not fit are counted.

    Args:
        found: What the session has found.
        max_bytes: The limit.
        conclusion: How the job ended, as its CI says; the session of another job than ``success`` is no success.
        notice: A paragraph after the first line, as Markdown.
    """
    ended = f"ended by {found.ended_by}" if found.ended_by else ""
    head = f"## {headline(found, conclusion)}\n\n{notice}{escaped('; '.join(filter(None, [ended, found.totals])))}\n"
    left = max_bytes - len(head.encode()) - 100
    foot = _shown_provenance(found.provenance)
    if len(foot.encode()) > left // 4:
        foot = ""
    left -= len(foot.encode())
    unlisted = found.failed - len(found.failures)
    lines = [*(failure.reason for failure in found.failures), *found.findings]
    num_more = unlisted + found.num_findings - len(found.findings)
    kept = _limited(map(_item, lines), left // 2, "findings", num_more)
    left -= sum(len(part.encode()) for part in kept)
    evidence = min(_MAX_EVIDENCE, left // _MAX_FAILURES)
    shown = _limited((_failure(failure, evidence) for failure in found.failures), left, "failures", unlisted)
    num_folded = len(lines) + num_more - _MAX_OPEN
    folded = _folded(f"{num_folded} more", "".join(kept[_MAX_OPEN:])) if kept[_MAX_OPEN:] else ""
    return "".join([head, "\n", *kept[:_MAX_OPEN], folded, *shown, foot])


def headline(found: Findings, conclusion: str = "success") -> str:
    """Return the verdict of a session in one line.

    A session with an undecided test, a test that compared nothing or a retry is not a success, nor is one without a
    passed test.
    """
    doubts = (
        (found.undecided, "without a decision"),
        (found.not_compared, "without a comparison"),
        (found.retried, "retried"),
    )
    notes = "".join(f", {count} {text}" for count, text in doubts if count)
    seen = f", {caught_text(found.caught)}" if found.caught else ""
    tests = counted(found.tests, "test")
    if found.ended_by:
        return f"{_FAILED} pytest-aorta: the run ended early, {found.failed} of {tests} failed until then{notes}{seen}"
    if found.failed:
        return f"{_FAILED} pytest-aorta: {found.failed} of {tests} failed{notes}{seen}"
    if conclusion != "success":
        return f"{_FAILED} pytest-aorta: the job ended with {conclusion}, although its findings have no failed test"
    symbol = _WARNING if notes or not found.passed else _PASSED
    return f"{symbol} pytest-aorta: {found.passed} of {tests} passed{notes}{seen}"


def escaped(text: str) -> str:
    """Return text escaped for one line, so that Markdown and HTML show the text as is.

    A zero-width space keeps addresses and references to users and issues from becoming links.
    """
    line = _line(text)
    shown = _LINKED.sub(rf"\g<0>{_ZERO_WIDTH_SPACE}", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))
    return _SLASH + shown[1:] if shown.startswith("/") else shown


def _preformatted(text: str) -> str:
    """Return text as a ``pre`` element, in which Markdown, references and quick actions have no effect."""
    lines = (html.escape(printable(line.expandtabs()), quote=False) for line in text.splitlines())
    safe = (re.sub(r"^(\s*)/", rf"\1{_SLASH}", line) for line in lines)
    return "<pre>" + "\n".join(safe) + "</pre>"


def _line_on(record: TestRecord, text: str, case: str = "") -> _Finding:
    """Return a line on a test, or on one of its comparisons if it has several."""
    name = case if case and len({row.case for row in record.verdicts}) > 1 else record.nodeid
    return _Finding(_cut(name + record.attempt_label), _cut(text, _MAX_LINE))


def _provenance(records: Sequence[TestRecord], command: Sequence[str]) -> dict[str, str]:
    """Return each label -> the values of the candidate's launches in order."""
    comparisons = [comparison for record in records for comparison in record.comparisons]
    values = provenance_values([facts for one in comparisons for facts in one.facts(Side.CANDIDATE)], command)
    return {label: _cut(", ".join(shown)) for label, shown in values.items()}


def _cut(text: str, limit: int = _MAX_VALUE) -> str:
    return brief(_unicode(text), limit)


def _unicode(text: str) -> str:
    """Return text as a JSON file can hold it: names of files may have bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _item(line: _Finding) -> str:
    return f"- **{escaped(line.test)}**: {escaped(line.text)}\n"


def _folded(title: str, content: str) -> str:
    """Return content that is folded below a title, both of which are HTML or Markdown."""
    return f"\n<details><summary>{title}</summary>\n\n{content}\n</details>\n"


def _failure(failure: _Failure, limit: int) -> str:
    shown = failure.text[:limit]
    cut = failure.length - len(shown)
    text = shown + (f"\n... and {cut:,} more characters" if cut > 0 else "")
    evidence = f"{_preformatted(text)}\n\nReproduce it:\n\n{_preformatted(failure.command)}\n"
    return _folded(_code(failure.reason.test), evidence)


def _code(text: str) -> str:
    """Return text as an element ``code``, on one line."""
    return f"<code>{html.escape(_line(text))}</code>"


def _line(text: str) -> str:
    """Return text on one line; the mark of a success, which only a headline gives, is escaped."""
    return printable(" ".join(text.split())).replace(_PASSED, ascii(_PASSED)[1:-1])


def _shown_provenance(values: Mapping[str, str]) -> str:
    """Return the provenance as a folded list."""
    if not values:
        return ""
    title = _code(brief(f"commit {values.get('commit')}, torch {values.get('torch')}"))
    return _folded(f"Measured: {title}", "".join(_item(_Finding(*pair)) for pair in values.items()))


def _limited(parts: Iterable[str], max_bytes: int, noun: str, num_more: int) -> list[str]:
    """Return the first parts that fit, and the number of parts that do not fit."""
    kept, left, dropped = [], max_bytes - 100, max(num_more, 0)
    for part in parts:
        size = len(part.encode("utf-8", "replace"))
        if left < 0 or size > left:
            left, dropped = -1, dropped + 1
        else:
            left -= size
            kept.append(part)
    return [*kept, *([f"\n... and {dropped} more {noun}\n"] if dropped else [])]
