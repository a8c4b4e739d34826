"""Renders a session as Markdown, for a comment on a pull request and for GitHub's page of a job.

The first line is the verdict. The findings follow as a table, then the evidence of each failure with the command that
repeats it, then the provenance of the launches. Text from tests is escaped, so that it neither changes the structure
nor mentions a user, links an issue or an address, or runs a quick action of GitLab.
"""

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from pytest_aorta.common.text import brief, counted, printable
from pytest_aorta.report.data import provenance_values
from pytest_aorta.session.record import Side, TestRecord, finding_groups, totals
from pytest_aorta.session.rounds import Repeated
from pytest_aorta.verdict.verdicts import FINDINGS, Verdict

# GitHub drops the whole summary of a step above 1 MiB, and other programs may write to the same file.
MAX_BYTES = 512 << 10
# GitHub refuses comments of more than 65,536 characters; CI adds a link.
MAX_COMMENT_BYTES = 60_000
_MAX_EVIDENCE = 8_000
_MAX_FAILURES = 20
_MAX_VALUE = 2_000
_HEAD = ("test", "verdict", "metric", "baseline -> value", "change [95%]", "limit", "reason")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")
# What GitHub and GitLab make links of: users, issues, labels, milestones and addresses. They look for them in the
# rendered text, so a backslash does not prevent a link.
_LINKED = re.compile(r"""@|:(?=//)|www(?=\.)|(?:\\[#!$~]|%|&amp;)(?=[\w"])|\bGH\\-(?=\d)|\\\[(?=\w+:)""", re.IGNORECASE)
_ZERO_WIDTH_SPACE = "&#8203;"
_FAILED, _WARNING, _PASSED = "\N{CROSS MARK}", "\N{WARNING SIGN}\N{VARIATION SELECTOR-16}", "\N{WHITE HEAVY CHECK MARK}"


def markdown(
    records: Sequence[TestRecord],
    *,
    command: Sequence[str] = (),
    argument_of: Callable[[str], str] = str,
    repeated: Sequence[str] = (),
    ended_by: str = "",
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the Markdown of a session in at most ``max_bytes`` of UTF-8; parts that do not fit are counted.

    Args:
        records: The records of all tests.
        command: Words of the command line, for the provenance.
        argument_of: Returns the argument that names a test to pytest, of its node id.
        repeated: Words that repeat the run's options in the command that reproduces a failure.
        ended_by: What ended the run before all tests had run, such as Ctrl-C; empty if nothing did.
        max_bytes: The limit.
    """
    ended = ([f"ended by {ended_by}"] if ended_by else []) + ([totals(records)] if records or not ended_by else [])
    head = f"## {headline(records, is_cut_short=bool(ended_by))}\n\n{escaped('; '.join(ended))}\n"
    left = max_bytes - len(head.encode()) - 100
    foot = _provenance(records, command)
    if len(foot.encode()) > left // 4:
        foot = ""
    left -= len(foot.encode())
    table = _limited(_table(_findings(records)), left // 2, "findings")
    failed = [record for record in records if record.has_failed]
    left -= len(table.encode())
    evidence = min(_MAX_EVIDENCE, left // _MAX_FAILURES)
    shown = (
        _failure(record, Repeated(argument_of(record.nodeid), repeated).command(), evidence)
        for record in failed[:_MAX_FAILURES]
    )
    return head + table + _limited(shown, left, "failures", len(failed) - _MAX_FAILURES) + foot


def headline(records: Sequence[TestRecord], *, is_cut_short: bool = False) -> str:
    """Return the verdict of a session in one line.

    A session with an undecided test, a test that compared nothing, a retry or a failure that a test hides is not a
    success, nor is one without a passed test.
    """
    final = [record for record in records if not record.is_retried]
    failed, passed = sum(record.has_failed for record in final), sum(record.outcome == "passed" for record in final)
    hidden = sum(record.hides_failure for record in final)
    doubts = [
        (sum(record.is_undecided for record in final), "without a decision"),
        (sum(record.compared_nothing for record in final), "without a comparison"),
        (len(records) - len(final), "retried"),
    ]
    notes = "".join(f", {count} {text}" for count, text in [(hidden, "with a hidden regression"), *doubts] if count)
    tests = counted(len(final), "test")
    if is_cut_short:
        return f"{_FAILED} pytest-aorta: the run ended early, {failed} of {tests} failed until then{notes}"
    if failed:
        return f"{_FAILED} pytest-aorta: {failed} of {tests} failed{notes}"
    symbol = _FAILED if hidden else _WARNING if notes or not passed else _PASSED
    return f"{symbol} pytest-aorta: {passed} of {tests} passed{notes}"


def escaped(text: str) -> str:
    """Return text escaped for one cell of a table, so that Markdown and HTML show the text as is.

    A zero-width space keeps addresses and references to users and issues from becoming links.
    """
    line = printable(" ".join(text.split()))
    return _LINKED.sub(rf"\g<0>{_ZERO_WIDTH_SPACE}", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))


def preformatted(text: str) -> str:
    """Return text as a ``pre`` element, in which Markdown, references and quick actions have no effect."""
    lines = (html.escape(printable(line.expandtabs()), quote=False) for line in text.splitlines())
    # GitLab runs a line that starts with a slash, such as /close, as a command.
    safe = (re.sub(r"^(\s*)/", r"\1&#47;", line) for line in lines)
    return "<pre>" + "\n".join(safe) + "</pre>"


def _findings(records: Sequence[TestRecord]) -> list[list[str]]:
    """Return the cells of each finding, the worst first; metrics without a baseline share a row per comparison."""
    groups = [(record, rows) for record in records for rows in finding_groups(record)]
    worst_first = sorted(groups, key=lambda group: FINDINGS.index(group[1][0].outcome))
    return [_cells(record, rows) for record, rows in worst_first]


def _cells(record: TestRecord, rows: Sequence[Verdict]) -> list[str]:
    first = rows[0]
    is_one_of_several = len({row.case for row in record.verdicts}) > 1
    name = (first.case if is_one_of_several else record.nodeid) + record.attempt_label
    cells = first.cells() if len(rows) == 1 else (first.label, f"{len(rows)} metrics", "-", "-", "-")
    return [name, *cells, first.reason or "-"]


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield one part per row; the first one contains the head."""
    head = f"\n| {' | '.join(map(escaped, _HEAD))} |\n|{' --- |' * len(_HEAD)}\n"
    for cells in rows:
        yield f"{head}| {' | '.join(escaped(brief(cell, _MAX_VALUE)) for cell in cells)} |\n"
        head = ""


def _failure(record: TestRecord, command: str, limit: int) -> str:
    title = html.escape(printable(" ".join((record.nodeid + record.attempt_label).split())))
    cut = len(record.failure) - limit
    text = record.failure[:limit] + (f"\n... and {cut:,} more characters" if cut > 0 else "")
    return (
        f"\n<details><summary><code>{title}</code></summary>\n\n{preformatted(text)}\n\nReproduce it:\n\n"
        f"{preformatted(command)}\n\n</details>\n"
    )


def _provenance(records: Sequence[TestRecord], command: Sequence[str]) -> str:
    """Return the provenance of the candidate's launches as a folded list; values that differ are listed in order."""
    comparisons = [comparison for record in records for comparison in record.comparisons]
    values = provenance_values([facts for one in comparisons for facts in one.facts(Side.CANDIDATE)], command)
    if not values:
        return ""
    title = html.escape(brief(f"commit {', '.join(values['commit'])}, torch {', '.join(values['torch'])}"))
    lines = [f"- {label}: {escaped(brief(', '.join(shown), _MAX_VALUE))}\n" for label, shown in values.items()]
    return f"\n<details><summary>Measured: <code>{title}</code></summary>\n\n{''.join(lines)}\n</details>\n"


def _limited(parts: Iterable[str], max_bytes: int, noun: str, num_more: int = 0) -> str:
    """Return the first parts that fit, joined, and the number of parts that do not fit."""
    kept, left, dropped = [], max_bytes - 100, max(num_more, 0)
    for part in parts:
        size = len(part.encode("utf-8", "replace"))
        if left < 0 or size > left:
            left, dropped = -1, dropped + 1
        else:
            left -= size
            kept.append(part)
    return "".join(kept) + (f"\n... and {dropped} more {noun}\n" if dropped else "")
