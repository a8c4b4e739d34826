"""The section ``aorta`` of pytest's terminal summary: verdicts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_aorta.common.text import aligned, brief, counted
from pytest_aorta.plan.world import SIMULATED
from pytest_aorta.session.record import TestRecord, finding_text, totals
from pytest_aorta.verdict.attribution import LEAST_TESTS, Cause
from pytest_aorta.verdict.metrics import METRICS, MetricKind, Origin, format_value
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import NoteKind, Open

# Characters of the last line.
MAX_LINE = 112


def summary_lines(records: Sequence[TestRecord], verbosity: int = 0) -> list[str]:
    """Return the lines of a run, the last of which counts its verdicts.

    Verbosity -1 shows one line per finding that no failure contains, 0 warnings too, 1 one row per metric with its
    reason, and -2 the last line alone.
    """
    lines: list[str] = []
    if verbosity >= -1:
        of_record = _all_lines if verbosity > 0 else _finding_lines
        lines += [line for record in records for line in of_record(record)]
    if verbosity >= 0:
        lines += [*_simulated(records), *_within_limits(records), *_slower_at_once(records), *_warnings(records)]
    notes = [note for record in records if not _has_finding(record) for note in record.unshown_notes]
    hidden = sum(note.kind is not NoteKind.WARNING for note in notes)
    hint = f" [-v for {counted(hidden, 'note')}]" if hidden and not verbosity else ""
    line, most = totals(records), MAX_LINE - len(hint)
    if len(line) > most:  # the rows have the other reasons
        line = totals(records, is_short=True)
        # Beside a finding, what was not compared can wait.
        line = brief(line, most) if any(map(_has_finding, records)) else line
    return [*lines, f"aorta: {line}{hint}"]


def _has_finding(record: TestRecord) -> bool:
    return any(verdict.is_finding for verdict in record.verdicts)


def _name(record: TestRecord, case: str = "") -> str:
    """Return the name of a test, or that of one of its comparisons if it has several."""
    return _short_nodeid(case if len(record.comparisons) > 1 and case else record.nodeid) + record.attempt_label


def _all_lines(record: TestRecord) -> Iterator[str]:
    """Yield the name of each comparison, a row for each metric that was compared or measured, and the notes."""
    for one in record.comparisons:
        rows = [
            ((row.label, row.metric, row.both, row.change, f"limit {row.tolerance}"), row.reason) for row in one.rows
        ]
        compared = {row.metric for row in one.rows}
        rows += [
            (("measured", name, format_value(value, METRICS[name].unit), "-", ""), "")
            for name, value in one.measured.items()
            if name not in compared
        ]
        lines = aligned([cells for cells, _ in rows], [reason for _, reason in rows]) if rows else []
        yield from (
            _name(record, one.case),
            *(f"  {line}" for line in lines),
            *(f"  note: {note}" for note in one.notes),
        )
    yield from (f"{_name(record)}: {trace}" for trace in record.traces)


def _finding_lines(record: TestRecord) -> Iterator[str]:
    """Yield a line for each finding and note that the failure does not contain."""
    yield from (f"{_name(record, rows[0].case)}: {finding_text(rows)}" for rows in record.unshown_findings)
    notes = record.unshown_notes if _has_finding(record) else []
    yield from (f"{_name(record)}: {note}" for note in (*notes, *record.traces))


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


def _slower_at_once(records: Sequence[TestRecord]) -> Iterator[str]:
    """Yield a line for each platform on which all tests got slower than their baselines, and nothing else changed."""
    for platform in sorted({record.platform for record in records}):
        tests = [record for record in records if record.platform == platform and not record.is_retried]
        stored = [[row for row in one.verdicts if row.is_compared and not row.reference.is_ab] for one in tests]
        timed = [rows for rows in stored if any(row.definition.kind is MetricKind.TIMING for row in rows)]
        slower = [{row.definition.kind for row in rows if row.outcome is Outcome.REGRESSION} for rows in timed]
        if len(timed) >= LEAST_TESTS and all(kinds == {MetricKind.TIMING} for kinds in slower):
            what = f"all {len(timed)} tests with times on {platform} got slower at once, and nothing else changed"
            yield f"moved: {Cause.MACHINE}: {what}; to settle it: aorta doctor --check"


def _within_limits(records: Sequence[TestRecord]) -> Iterator[str]:
    """Yield a line for each cost that changed, but by no more than its tolerance: costs repeat to the last unit."""
    for record in records:
        for row in record.verdicts:
            if row.is_within_limit:
                change = f"{row.metric} {row.both}, within its limit of {row.tolerance}"
                yield f"{_name(record, row.case)}: {change}: {row.detail}"


def _warnings(records: Sequence[TestRecord]) -> list[str]:
    """Return a line on speed that was not compared, and a warning about the verdicts that passed without a decision."""
    rows = [row for record in records if not record.is_retried for row in record.verdicts]
    absent = next((row.detail for row in rows if row.not_applicable and row.tolerance.origin is Origin.GROSS), "")
    lines = [f"speed was not compared: {absent}; --aorta-ab=REF compares it"] if absent else []
    lines += [
        f"WARNING: {_name(record)}: {note}"
        for record in records
        for note in record.unshown_notes
        if note.kind is NoteKind.WARNING
    ]
    # A verdict that is still open is left out: another verdict of its test ended the launches.
    undecided = [row for row in rows if row.outcome is Outcome.INCONCLUSIVE and not isinstance(row.state, Open)]
    if not undecided:
        return lines
    what = "speed" if any(row.definition.kind is MetricKind.TIMING for row in undecided) else "a metric"
    strict = "; --aorta-fail-on=marked-inconclusive,missing fails such a test"
    more = strict if any(row.tolerance.origin is Origin.MARKER for row in undecided) else ""
    return [*lines, f"WARNING: {what} was not decided; --aorta-ab=REF or --aorta-max-launches=12 can decide{more}"]


def _short_nodeid(nodeid: str) -> str:
    """Return a node id without its folders."""
    file, _, test = nodeid.partition("::")
    return f"{Path(file).stem}::{test}"
