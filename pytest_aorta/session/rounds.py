"""Comparisons that ask for launches until they are final, and the text of one that failed."""

import math
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pytest_aorta.common.errors import AortaError, WorkloadFailed
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options import PYTHON_PREFIX
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import Comparison, Side
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import MetricKind, Origin, metric_of
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    DIFFERS,
    FINDINGS,
    Missing,
    NoteKind,
    Reason,
    Unrecorded,
    Verdict,
    Verdicts,
    format_change,
)

N = TypeVar("N")
R = TypeVar("R")
Comparing: TypeAlias = Generator[Side, LaunchFacts, Verdicts]


def settle(comparing: Generator[N, LaunchFacts, R], launch: Callable[[N], LaunchFacts]) -> R:
    """Give a comparison each launch that it asks for, and return what it returns.

    A failed launch is raised inside the comparison, which may go on without it.
    """
    try:
        need = next(comparing)
        while True:
            try:
                facts = launch(need)
            except AortaError as error:
                need = comparing.throw(error)
            else:
                need = comparing.send(facts)
    except StopIteration as end:
        found: R = end.value
        return found


def with_baseline(comparison: StoredComparison, first: LaunchFacts) -> Comparing:
    """Compare a first launch and further ones of the candidate with the stored baseline."""
    launches = [first]
    verdicts = comparison.judge(launches)
    while verdicts.need_launches:
        launches.append((yield Side.CANDIDATE))
        verdicts = comparison.judge(launches, verdicts.decided)
    return verdicts


def in_pairs(
    comparison: PairedComparison,
    candidates: Iterable[LaunchFacts] = (),
    references: Iterable[LaunchFacts] = (),
    *,
    reference_first: bool = False,
) -> Comparing:
    """Compare with an A/B reference, in pairs of adjacent launches whose order alternates.

    Args:
        comparison: The comparison.
        candidates, references: Launches that exist already, as many of each.
        reference_first: The order of the first pair.
    """
    launches = {Side.CANDIDATE: [*candidates], Side.REFERENCE: [*references]}
    verdicts: Verdicts | None = None
    while verdicts is None or verdicts.need_launches:
        if verdicts is not None or not launches[Side.CANDIDATE]:
            # Alternate the order, so that a drift of the machine affects both sides equally.
            candidate_first = (len(launches[Side.CANDIDATE]) % 2 == 0) is not reference_first
            for side in launches if candidate_first else reversed(launches):
                launches[side].append((yield side))
        verdicts = comparison.judge(
            launches[Side.CANDIDATE], launches[Side.REFERENCE], verdicts.decided if verdicts else None
        )
    return verdicts


def with_both(comparison: StoredComparison, first: LaunchFacts, version: str) -> Comparing:
    """Compare a first launch with the stored baseline, and in pairs with ``version`` what the baseline can't decide."""
    verdicts = comparison.judge([first])
    names = [row.metric for row in verdicts.rows if _is_for_pairs(row, comparison)]
    if not names:
        return verdicts
    most = comparison.max_launches
    pairs = PairedComparison(comparison.case, comparison.marked, comparison.variance, names, most, version)
    return joined(verdicts, (yield from in_pairs(pairs)))


def _is_for_pairs(row: Verdict, comparison: StoredComparison) -> bool:
    """Return True if an A/B can decide a verdict and the stored baseline can't."""
    # Pairs have less noise, so an A/B can decide what further launches against the stored baseline could not.
    if row.outcome is Outcome.INCONCLUSIVE and comparison.max_launches > 1:
        return True
    # The baseline comes from another machine, hour or launcher, or was too noisy.
    is_asked = row.metric in comparison.marked or row.not_applicable is Reason.UNMARKED_CPU_TIMES
    return row.not_applicable is Reason.NOISY or (row.not_applicable is not None and is_asked)


def joined(stored: Verdicts, paired: Verdicts) -> Verdicts:
    """Return the stored verdicts, but the A/B's verdicts for the metrics that the A/B compared, and its notes."""
    by_metric = {row.metric: row for row in paired.rows}
    rows = tuple(by_metric.get(row.metric, row) for row in stored.rows)
    return Verdicts(stored.case, rows, paired.notes or stored.notes, paired.suspect)


_MAX_DETAILS = 8


def failed_checks_text(result: WorkloadResult) -> str:
    """Return the failed checks of a workload, with the first details in full."""
    first = result.failure_details[:_MAX_DETAILS]
    lines = [f"{result.workload}: {result.failure_count} of its own checks failed on {result.platform}"]
    lines += [f"  {detail}" for detail in first]
    if result.failure_count > len(first):
        lines.append(f"  ... and {result.failure_count - len(first)} more")
    return "\n".join(lines)


def passed(result: WorkloadResult) -> WorkloadResult:
    """Return the result of a workload whose own checks have passed.

    Raises:
        WorkloadFailed: The checks found wrong values.
    """
    if not result.passed:
        raise WorkloadFailed(failed_checks_text(result))
    return result


@dataclass(frozen=True)
class Repeated:
    """The commands that repeat a test.

    Attributes:
        test: The argument that names the test to pytest.
        options: Words that repeat the options of this run.
        commit: The commit that last changed the baseline, shortened, how long ago, and whether the file has been
            deleted since; empty without one.
        has_later: Whether other commits followed.
        is_recording: Whether the test records its baseline.
    """

    test: str
    options: Sequence[str] = ()
    commit: tuple[str, ...] = ()
    has_later: bool = False
    is_recording: bool = False

    def command(self, *words: str) -> str:
        """Return the command that runs the test again, with further options."""
        return shlex.join(["pytest", self.test, *self.options, *words])


# The reason why a metric was not compared -> what makes it comparable, the surest first: a label, a text before the
# command, and the words of the command.
_RECORD_AGAIN = ("--update-baselines", "--aorta-record=replace")
_IN_PAIRS = ("--aorta-ab=HEAD",)
_REMEDIES: dict[Reason, tuple[str, str, tuple[str, ...]]] = {
    **dict.fromkeys((Reason.ENVIRONMENT, Reason.VERSIONS, Reason.LAUNCHER), ("accept", "", _RECORD_AGAIN)),
    **dict.fromkeys((Reason.NOISY, Reason.OLD_CPU_TIMES), ("confirm", "", _IN_PAIRS)),
    Reason.NOT_REPRODUCIBLE: (
        "next",
        "call torch.manual_seed(0) and torch.use_deterministic_algorithms(True) before the model is built, then ",
        _RECORD_AGAIN,
    ),
    Reason.UNMARKED_CPU_TIMES: ("next", "add @pytest.mark.tolerance(step_time_p50='10%'), then ", _IN_PAIRS),
    Reason.HEAD_START: ("next", "add @pytest.mark.tolerance(step_time_mean='5%')", ()),
    Reason.TRACE: ("next", "profile fewer steps", ()),
}


def comparison_text(comparison: Comparison, failing: Sequence[Verdict], again: Repeated | None = None) -> str:
    """Return the text of a failed comparison.

    What was edited is said first, as far as facts show it. The verdicts follow, one line each, the worst with its
    change first, then labelled lines: what was measured, the causes, the baseline, and commands that confirm the
    change, find its commit and accept it.
    Without ``failing`` verdicts, nothing was compared. Without ``again``, no commands are given.
    """
    rows = sorted(failing, key=_severity) or comparison.rows
    unrecorded = [row for row in failing if row.remedy]
    others = [row for row in rows if not row.remedy]
    lines = [row.headline for row in others]
    if not failing:
        none = "no metric has a tolerance, and the launch has no weight hash; name one in a marker"
        what = "Not recorded, since nothing would be compared" if again and again.is_recording else "Nothing compared"
        lines = [f"{what}: {', '.join(row.metric for row in rows) or none}"]
    if others and failing and comparison.suspect is not None and metric_of(others[0].metric).kind is MetricKind.TIMING:
        lines[0] += f", suspect rank {comparison.suspect}"
    if unrecorded:
        lines.append(f"Missing: {unrecorded[0].detail}")
    facts = [("measured", _measured(comparison, rows)), *_causes(others, is_any=bool(failing))]
    notes = [note for note in comparison.notes if note.kind is not NoteKind.EDIT]
    facts += [*_fewer(comparison, failing), *((note.kind, note.text) for note in notes)]
    if version := next((row.reference.name for row in rows if row.reference.is_ab and row.reference.name), ""):
        facts.append(("baseline", f"{version}, launched in turn with this code"))
    elif comparison.baseline and not (again and again.is_recording):
        facts.append(("baseline", ", ".join([*(again.commit if again else ()), comparison.baseline])))
    if again is not None:
        facts += _commands(comparison, rows, again)
    edited = [note.text for note in comparison.notes if note.kind is NoteKind.EDIT]
    return "\n".join([*edited, *lines, *(f"  {label:<8}  {text}" for label, text in facts)])


def _severity(row: Verdict) -> tuple[int, float]:
    """Return a key that sorts the worst verdict first: other bits, then the largest change."""
    order = FINDINGS.index(row.outcome) if row.outcome in FINDINGS else len(FINDINGS)
    return order, -math.inf if row.delta is None else -abs(row.delta)


def _measured(comparison: Comparison, rows: Sequence[Verdict]) -> str:
    parts = [f"{comparison.workload} on {comparison.platform}"]
    if launches := comparison.facts(Side.CANDIDATE):
        parts.append(counted(launches[-1].num_steps, "step"))
    if rows and rows[0].launches > 1:
        parts.append(f"{rows[0].launches} launches")
    if rows and rows[0].low is not None and rows[0].high is not None:
        scale = metric_of(rows[0].metric).scale
        parts.append(f"95% {format_change(rows[0].low, scale)} to {format_change(rows[0].high, scale)}")
    return ", ".join(parts)


def _causes(rows: Sequence[Verdict], *, is_any: bool) -> Iterator[tuple[str, str]]:
    """Yield the explanations that the verdicts' own lines do not contain; of several metrics, each names its metric."""
    for row in rows:
        if row.detail and (row.is_compared or not is_any):
            yield "cause", row.detail if len(rows) == 1 else f"{row.metric}: {row.detail}"


def _fewer(comparison: Comparison, failing: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """Yield the costs that went down beside a regression: a collective that has gone may be its cause."""
    if any(row.outcome is Outcome.REGRESSION for row in failing):
        for row in comparison.rows:
            if row.outcome is Outcome.IMPROVED and metric_of(row.metric).cost is not None:
                yield "changed", f"{row.metric} {row.change} ({row.both}){f': {row.reason}' if row.reason else ''}"


def _commands(comparison: Comparison, rows: Sequence[Verdict], again: Repeated) -> Iterator[tuple[str, str]]:
    """Yield the commands that confirm a change, find its commit, and accept it."""
    present = [row for row in rows if not row.is_lost]
    outcomes, reasons = {row.outcome for row in present}, {row.not_applicable for row in present}
    reasons |= {Reason.UNMARKED_CPU_TIMES for row in present if row.tolerance.origin is Origin.GROSS}
    version = next((row.reference.name for row in present if row.reference.is_ab), None)
    is_noisy, is_stored = any(row.low is not None for row in present), bool(comparison.baseline)
    if is_noisy and is_stored and version is None:
        yield "confirm", again.command(f"--aorta-ab={again.commit[0] if again.commit else 'HEAD'}")
    elif Outcome.INCONCLUSIVE in outcomes:
        yield "confirm", again.command("--aorta-max-launches=12")
    if is_stored and version is None and not reasons.isdisjoint(DIFFERS):
        yield "compare", again.command("--aorta-ab=python:PATH")
    good = version or (again.commit[0] if again.commit else "")
    is_bisectable = again.has_later if version is None else version != "HEAD" and not version.startswith(PYTHON_PREFIX)
    if Outcome.REGRESSION in outcomes and is_stored and good and is_bisectable:
        yield "find", shlex.join(["aorta", "bisect", good, "HEAD", "--", again.test, *again.options])
    if is_stored and (outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}):
        yield "accept", again.command(*_RECORD_AGAIN)
    elif any(row.remedy for row in rows):
        if replaces := any(isinstance(row.state, Missing) and row.state.unrecorded is Unrecorded.STEPS for row in rows):
            yield "note", "if the other number of steps is intended, replace what was recorded:"
        yield "accept", again.command(*(_RECORD_AGAIN if replaces else _RECORD_AGAIN[:1]))
    elif is_stored and (remedy := next((how for reason, how in _REMEDIES.items() if reason in reasons), None)):
        label, text, words = remedy
        yield label, text + (again.command(*(_RECORD_AGAIN[:1] if again.is_recording else words)) if words else "")
