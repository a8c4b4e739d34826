"""The section ``aorta`` of pytest's terminal summary: verdicts and durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common.text import aligned, brief, counted
from pytest_aorta.plan.world import SIMULATED
from pytest_aorta.result.outcome import PHASES
from pytest_aorta.session.record import TestRecord, finding_cells, finding_groups, totals
from pytest_aorta.verdict.metrics import METRICS, MetricKind, format_value, metric_of
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

_COLUMNS = ("test", "metric", "value", "baseline", "change [95%]", "tolerance", "launches", "verdict")
# A row: its cells, and the text after them.
_Row: TypeAlias = tuple[tuple[str, ...], str]
# Characters of the list of undecided metrics.
_MAX_UNDECIDED = 400
_DURATIONS = ("wall", *PHASES)
_DURATION_COLUMNS = ("test", "launch", "launcher", *_DURATIONS)


def summary_lines(records: Sequence[TestRecord], verbosity: int = 0) -> list[str]:
    """Return the lines of a run, the last of which counts its verdicts.

    Verbosity 0 shows one row per finding, 1 one row per metric with its reason, and -1 the last line alone.
    """
    if verbosity < 0:
        return [f"aorta: {totals(records)}"]
    is_verbose = verbosity > 0
    rows = [row for record in records for row in (_all_rows(record) if is_verbose else _finding_rows(record))]
    table = aligned([_COLUMNS, *(cells for cells, _ in rows)], ["", *(reason for _, reason in rows)]) if rows else []
    notes = [
        f"note: {short_nodeid(record.nodeid)}{record.attempt_label}: {note}"
        for record in records
        for note in (*record.traces, *(record.notes if is_verbose else _needed_notes(record)))
    ]
    hint = "" if is_verbose else _hint(records)
    return [*table, *notes, *_simulated(records), *_warnings(records), f"aorta: {totals(records)}{hint}"]


def _hint(records: Sequence[TestRecord]) -> str:
    """Return a hint that names the output that ``-v`` adds, or an empty text."""
    if not any(record.verdicts for record in records):
        return ""
    hidden = sum(len(_new(record, record.notes)) - len(_needed_notes(record)) for record in records)
    added = ["the table", counted(hidden, "note")] if hidden else ["the table"]
    return f" [-v for {' and '.join(added)}]"


def _all_rows(record: TestRecord) -> list[_Row]:
    """Return a row for each metric that was compared or measured."""
    return [*(_row(record, verdict, verdict.reason) for verdict in record.verdicts), *_measured_rows(record)]


def _finding_rows(record: TestRecord) -> list[_Row]:
    """Return a row for each finding, with the reason that the test's failure does not contain.

    Metrics without a baseline share a row.
    """
    groups = sorted(finding_groups(record), key=lambda rows: bool(rows[0].remedy))
    return [_finding_row(record, rows) for rows in groups]


def _finding_row(record: TestRecord, rows: Sequence[Verdict]) -> _Row:
    first = rows[0]
    reason = first.reason if first.remedy else "".join(_new(record, [first.reason]))
    return (short_nodeid(first.case) + record.attempt_label, *finding_cells(rows)), reason


def _row(record: TestRecord, verdict: Verdict, reason: str) -> _Row:
    return (short_nodeid(verdict.case) + record.attempt_label, *verdict.cells()), reason


def _needed_notes(record: TestRecord) -> list[str]:
    """Return the notes on findings that the test's failure does not contain."""
    return _new(record, record.notes) if any(verdict.is_finding for verdict in record.verdicts) else []


def _new(record: TestRecord, texts: Sequence[str]) -> list[str]:
    """Return the texts that the failure does not contain; pytest prints no failure of a retried attempt."""
    return [text for text in texts if not (record.has_failed and text in record.failure)]


def _measured_rows(record: TestRecord) -> list[_Row]:
    """Return a row for each metric that was measured and not compared."""
    compared = {(row.case, row.metric) for row in record.verdicts}
    return [
        (
            (
                short_nodeid(one.case) + record.attempt_label,
                name,
                format_value(value, METRICS[name].unit),
                *("-",) * 4,
                "measured",
            ),
            "",
        )
        for one in record.comparisons
        for name, value in one.measured.items()
        if (one.case, name) not in compared
    ]


def _simulated(records: Sequence[TestRecord]) -> list[str]:
    """Return what the tests in simulated worlds did not compare, once for all of them."""
    found = [record for record in records if record.verdicts and record.platform.startswith(f"{SIMULATED}-")]
    if not found:
        return []
    platforms = ", ".join(sorted({record.platform for record in found}))
    return [
        f"simulated: {counted(len(found), 'test')} on {platforms}: costs are compared; weights, losses and times are "
        f"not simulated"
    ]


def _warnings(records: Sequence[TestRecord]) -> list[str]:
    """Return a warning about the verdicts that passed without a decision."""
    # A verdict that is still open is left out: another verdict of its test ended the launches.
    undecided = [
        row
        for record in records
        if not record.is_retried
        for row in record.verdicts
        if row.outcome is Outcome.INCONCLUSIVE and not row.is_open
    ]
    if not undecided:
        return []
    is_speed = any(metric_of(row.metric).kind is MetricKind.TIMING for row in undecided)
    names = [f"{row.metric}{', which a marker names,' if row.is_marked else ''} in {row.case}" for row in undecided]
    return [
        f"WARNING: {'speed' if is_speed else 'a metric'} was not decided: {brief('; '.join(names), _MAX_UNDECIDED)}; "
        f"--aorta-ab=REF or more launches (--aorta-max-launches) can decide, and "
        f"--aorta-fail-on=marked-inconclusive,missing fails a test whose marker names the metric"
    ]


def durations_lines(records: Sequence[TestRecord], most: int = 0, at_least_s: float = 0.0) -> list[str]:
    """Return one line per launch, in seconds, the longest first, then the sums over all launches.

    ``most`` is the largest number of launches to list, 0 for all, and ``at_least_s`` is the shortest time to list.
    """
    launches = [
        (short_nodeid(record.nodeid) + record.attempt_label, number, launch)
        for record in records
        for number, launch in enumerate(record.launches, 1)
        if launch.times_s
    ]
    if not launches:
        return []
    launches.sort(key=lambda entry: -entry[2].times_s["wall"])
    shown = [entry for entry in launches[: most or None] if entry[2].times_s["wall"] >= at_least_s]
    rows = [(name, str(number), launch.launcher, *_seconds(launch.times_s)) for name, number, launch in shown]
    sums: Counter[str] = Counter()
    for _, _, launch in launches:
        sums.update(launch.times_s)
    table = [_DURATION_COLUMNS, *rows, ("total", str(len(launches)), "", *_seconds(sums))]
    cut = "" if len(shown) == len(launches) else f" ({len(shown)} of {len(launches)})"
    return [f"launches in seconds, longest first{cut}:", *aligned(table, [""] * len(table))]


def _seconds(times_s: Mapping[str, float]) -> list[str]:
    return [f"{times_s[name]:.2f}" if name in times_s else "-" for name in _DURATIONS]


def short_nodeid(nodeid: str) -> str:
    """Return a node id without its folders."""
    file, _, test = nodeid.partition("::")
    return f"{Path(file).stem}::{test}"
