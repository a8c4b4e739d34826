"""The section ``aorta`` of pytest's terminal summary: verdicts and durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aorta.common.text import aligned
from pytest_aorta.result.outcome import PHASES
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.text import totals
from pytest_aorta.verdict.metrics import METRICS, format_value
from pytest_aorta.verdict.statistics.decision import Outcome

_COLUMNS = ("test", "metric", "value", "baseline", "change [95%]", "tolerance", "launches", "verdict")
_DURATIONS = ("wall", *PHASES)
_DURATION_COLUMNS = ("test", "launch", "launcher", *_DURATIONS)


def summary_lines(records: Sequence[TestRecord], *, verbose: bool = False) -> list[str]:
    """Return one line per metric of every test, then notes, warnings and the totals.

    ``verbose`` adds the metrics that were measured and not compared.
    """
    rows = [
        (short_nodeid(verdict.case) + record.attempt_label, *verdict.cells())
        for record in records
        for verdict in record.verdicts
    ]
    reasons = [verdict.reason for record in records for verdict in record.verdicts]
    if verbose:
        measured = [row for record in records for row in _measured_rows(record)]
        rows, reasons = [*rows, *measured], [*reasons, *[""] * len(measured)]
    lines = aligned([_COLUMNS, *rows], ["", *reasons]) if rows else []
    notes = [
        f"note: {short_nodeid(record.nodeid)}{record.attempt_label}: {note}"
        for record in records
        for note in record.notes
    ]
    return [*lines, *notes, *warnings_of(records), totals(records)]


def _measured_rows(record: TestRecord) -> list[tuple[str, ...]]:
    """Return a row for each metric that was measured and not compared."""
    compared = {(row.case, row.metric) for row in record.verdicts}
    return [
        (
            short_nodeid(one.case) + record.attempt_label,
            name,
            format_value(value, METRICS[name].unit),
            "-",
            "-",
            "-",
            "-",
            "measured",
        )
        for one in record.compared
        for name, value in one.measured.items()
        if (one.case, name) not in compared
    ]


def warnings_of(records: Sequence[TestRecord]) -> list[str]:
    """Return a warning about the verdicts that passed without a decision."""
    # A verdict that is still open is left out: another verdict of its test ended the launches.
    undecided = [
        row
        for record in records
        for row in record.verdicts
        if row.outcome is Outcome.INCONCLUSIVE and not row.is_open and not record.is_retried
    ]
    if not undecided:
        return []
    named = ", ".join(f"{short_nodeid(row.case)} {row.metric}" for row in undecided)
    return [
        f"WARNING: no decision for {named}: --aorta-fail-on=inconclusive,missing fails such tests; more launches "
        f"(--aorta-max-launches), a wider tolerance or --aorta-ab=REF can decide them"
    ]


def durations_lines(records: Sequence[TestRecord]) -> list[str]:
    """Return one line per launch, in seconds, the longest first, then the sums."""
    launches = [
        (short_nodeid(record.nodeid) + record.attempt_label, launch)
        for record in records
        for launch in record.launch_times
    ]
    if not launches:
        return []
    launches.sort(key=lambda entry: -entry[1].times_s["wall"])
    rows = [(name, str(launch.number), launch.launcher, *_seconds(launch.times_s)) for name, launch in launches]
    sums: Counter[str] = Counter()
    for _, launch in launches:
        sums.update(launch.times_s)
    table = [_DURATION_COLUMNS, *rows, ("total", str(len(launches)), "", *_seconds(sums))]
    return ["launches in seconds, longest first:", *aligned(table, [""] * len(table))]


def _seconds(times_s: Mapping[str, float]) -> list[str]:
    return [f"{times_s[name]:.2f}" if name in times_s else "-" for name in _DURATIONS]


def short_nodeid(nodeid: str) -> str:
    """Return a node id without its folders."""
    file, _, test = nodeid.partition("::")
    return f"{Path(file).stem}::{test}"
