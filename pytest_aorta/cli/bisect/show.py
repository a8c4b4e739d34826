"""The lines that ``aorta bisect`` prints about a search."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.cli.bisect.history import Commit
from pytest_aorta.common.text import brief, counted, table
from pytest_aorta.session.search.log import LoggedEnd, Skip
from pytest_aorta.verdict.commit_search import Probe, ProbedCommit, SearchEnd, SearchOutcome
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.verdicts import format_change

_MAX_SUBJECT = 50


def event_line(event: Probe | Skip, commits: Sequence[Commit]) -> str:
    """Return a line about a probe or a skipped commit."""
    commit = commits[event.commit]
    if isinstance(event, Skip):
        return f"  skipped {commit}: {event.reason}"
    if event.before is not None:
        return f"  pair with {commits[event.before].hash[:12]}: {commit}"
    kind = "pair with the good commit" if event.reference is not None else "launch"
    return f"  {kind}: {commit}"


def end_lines(logged: LoggedEnd, commits: Sequence[Commit]) -> list[str]:
    """Return the result of a search, with the table of its probes."""
    end = logged.end
    lines = [f"{logged.case}:", *_result(end, commits)]
    if end.probed:
        lines += table([_HEADS, *(_row(row, end, commits) for row in end.probed)], indent="  ")
    else:
        lines += [f"  {verdict}" for verdict in logged.verdicts]
    return [*lines, *(f"  note: {note}" for note in end.notes)]


_HEADS = ("commit", "launches", "change", "has the change", "")


def _row(row: ProbedCommit, end: SearchEnd, commits: Sequence[Commit]) -> tuple[str, ...]:
    change = "-" if row.change is None else format_change(row.change, METRICS[end.metric].scale)
    commit = commits[row.commit]
    title = f"{commit.hash[:12]} {brief(commit.subject, _MAX_SUBJECT)}"
    return title, str(row.launches), change, f"{row.probability:.1%}", row.detail


def _result(end: SearchEnd, commits: Sequence[Commit]) -> list[str]:
    if end.outcome is SearchOutcome.ABSENT:
        return [f"  not found: {end.reason}"]
    change = _change(end)
    if end.outcome is SearchOutcome.UNDECIDED:
        likeliest = [
            f"  likeliest, with probability {end.probability:.3g}: {commits[number]}" for number in end.suspects
        ]
        return [f"  undecided: {end.reason}", *likeliest]
    found = [commits[number] for number in end.suspects]
    if len(found) == 1:
        return [f"  found: {found[0]}", f"  {change}", *_merge_hint(found[0])]
    first = f"  found: one of {counted(len(found), 'commit')}, of which only the last starts"
    return [first, *(f"    {commit}" for commit in found), f"  {change}"]


def _change(end: SearchEnd) -> str:
    """Return the metric, its change and the probability of the named commits."""
    probability = f"probability {min(end.probability, 0.9999):.2%}" + (" or more" if end.probability > 0.9999 else "")
    if end.change is None or end.low is None or end.high is None:
        return f"{end.metric} differs from that of the good commit; {probability}"
    if end.num_confirming:
        probability += f", confirmed in {counted(end.num_confirming, 'pair')} with the commit before"
    scale = METRICS[end.metric].scale
    low, high = (format_change(edge, scale) for edge in (end.low, end.high))
    return f"{end.metric} {format_change(end.change, scale)} [{low}, {high}]; {probability}"


def _merge_hint(commit: Commit) -> list[str]:
    if len(commit.parents) < 2:
        return []
    base, tip = commit.parents[0][:12], commit.parents[1][:12]
    return [f"  this is a merge; to search its branch: aorta bisect $(git merge-base {base} {tip}) {tip} ..."]
