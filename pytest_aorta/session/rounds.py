"""Comparisons that ask for launches until they are final, and the text of one that failed."""

import math
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from pytest_aorta.common.errors import AortaError, WorkloadFailed
from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import VISIBLE_VARIABLES
from pytest_aorta.plan.side import parse_side
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import Comparison, Side
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import MetricKind, Origin
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    DIFFERS,
    FINDINGS,
    Missing,
    NoteKind,
    Reason,
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
    go_on = partial(next, comparing)
    while True:
        try:
            need = go_on()
        except StopIteration as end:
            found: R = end.value
            return found
        try:
            go_on = partial(comparing.send, launch(need))
        except AortaError as error:
            go_on = partial(comparing.throw, error)


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
    """Compare a first launch with the stored baseline, and in pairs with ``version`` what the baseline can't decide.

    A baseline of this environment says nothing of another one, so a side with packages or variables is launched.
    """
    verdicts, is_commit = comparison.judge([first]), parse_side(version).is_commit
    names = [row.metric for row in verdicts.rows if not is_commit or _is_for_pairs(row, comparison)]
    if not names:
        return verdicts
    most = comparison.max_launches
    pairs = PairedComparison(comparison.case, comparison.marked, names, most, version, comparison.variance)
    return joined(verdicts, (yield from in_pairs(pairs)))


def _is_for_pairs(row: Verdict, comparison: StoredComparison) -> bool:
    """Return True if an A/B can decide a verdict and the stored baseline can't."""
    # Pairs have less noise, so an A/B can decide what further launches against the stored baseline could not.
    if row.outcome is Outcome.INCONCLUSIVE and comparison.max_launches > 1:
        return True
    # There is no baseline of these launches, or it comes from another machine, hour or launcher, or was too noisy.
    is_new = isinstance(row.state, Missing) and row.state.unrecorded is not None
    is_asked = row.metric in comparison.marked or row.not_applicable is Reason.UNMARKED_CPU_TIMES
    return is_new or row.not_applicable is Reason.NOISY or (row.not_applicable is not None and is_asked)


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
        version: The version that ``--aorta-ab`` names; empty without one.
        is_stored: Whether there is a baseline, which another one would replace.
        is_recording: Whether the test records its baseline.
    """

    test: str
    options: Sequence[str] = ()
    commit: tuple[str, ...] = ()
    has_later: bool = False
    version: str = ""
    is_stored: bool = True
    is_recording: bool = False

    def command(self, *words: str) -> str:
        """Return the command that runs the test again on the visible devices, with further options."""
        limits = [f"{name}={value}" for name in VISIBLE_VARIABLES if (value := os.environ.get(name))]
        return shlex.join([*limits, "pytest", self.test, *self.options, *words])

    def in_pairs(self, *words: str) -> str:
        """Return the command that launches in turn with the version of this run, or the recorded one."""
        known = self.version or (self.commit[0] if self.commit else "HEAD")
        return self.command(f"--aorta-ab={known}", *words)

    def record(self) -> str:
        """Return the command that records the baseline, which says so if it replaces one."""
        if not self.is_stored or self.is_recording:
            return self.command("--update-baselines")
        return f"{self.command(*RESET.split())}  # replaces the baseline"


# The reason why a metric was not compared -> what makes it comparable, the surest first: a label, a text before the
# command, and the command.
_REMEDIES: dict[Reason, tuple[str, str, Callable[[Repeated], str] | None]] = {
    **dict.fromkeys((Reason.ENVIRONMENT, Reason.VERSIONS, Reason.LAUNCHER), ("accept", "", Repeated.record)),
    **dict.fromkeys((Reason.NOISY, Reason.OLD_CPU_TIMES), ("confirm", "", Repeated.in_pairs)),
    Reason.NOT_REPRODUCIBLE: (
        "next",
        "call torch.manual_seed(0) and torch.use_deterministic_algorithms(True) before the model is built, then ",
        Repeated.record,
    ),
    Reason.UNMARKED_CPU_TIMES: ("next", "add @pytest.mark.tolerance(step_time_p50='10%'), then ", Repeated.in_pairs),
    Reason.HEAD_START: ("next", "add @pytest.mark.tolerance(step_time_mean='5%')", None),
    Reason.TRACE: ("next", "profile fewer steps", None),
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
        marker = "tolerance(step_time_p50='10%')"
        none = f"no metric has a tolerance, and the launch has no weight hash; name one in a marker, such as {marker}"
        what = "Not recorded, since nothing would be compared" if again and again.is_recording else "Nothing compared"
        lines = [f"{what}: {', '.join(row.metric for row in rows) or none}"]
    if others and failing and comparison.suspect is not None and others[0].definition.kind is MetricKind.TIMING:
        lines[0] += f", suspect rank {comparison.suspect}"
    if unrecorded:
        lines.append(f"Missing: {unrecorded[0].detail}")
    edited = [note.text for note in comparison.notes if note.kind is NoteKind.EDIT]
    facts = [("measured", _measured(comparison, rows)), *_causes(others, edited, is_any=bool(failing))]
    notes = [note for note in comparison.notes if note.kind is not NoteKind.EDIT]
    facts[1:1] = [(note.kind, note.text) for note in notes if note.kind is NoteKind.MOVED]
    facts += [*_changed(comparison), *((note.kind, note.text) for note in notes if note.kind is not NoteKind.MOVED)]
    if version := next((row.reference.name for row in rows if row.reference.is_ab and row.reference.name), ""):
        facts.append(("baseline", f"{version}, launched in turn with this code"))
        sides = [launch.provenance.side for launch in comparison.facts(Side.REFERENCE)]
        facts += [("differs", side.removeprefix(f"{version}: ")) for side in sides[-1:] if side not in ("", version)]
    elif comparison.baseline and not (again and again.is_recording):
        facts.append(("baseline", ", ".join([*(again.commit if again else ()), comparison.baseline])))
    if again is not None:
        facts += _commands(comparison, rows, again)
    return "\n".join([*edited, *lines, *(f"  {label:<8}  {text}" for label, text in facts)])


def _severity(row: Verdict) -> tuple[int, float]:
    """Return a key that sorts the worst verdict first: other bits, then the largest change."""
    order = FINDINGS.index(row.outcome) if row.outcome in FINDINGS else len(FINDINGS)
    return order, -math.inf if row.delta is None else -abs(row.delta)


def _measured(comparison: Comparison, rows: Sequence[Verdict]) -> str:
    parts = [f"{comparison.workload} on {comparison.platform}"]
    if launches := comparison.facts(Side.CANDIDATE):
        parts.append(counted(launches[-1].num_steps, "step"))
    for row in rows[:1]:
        if row.launches > 1:
            parts.append(f"{row.launches} launches")
        if row.low is not None and row.high is not None:
            scale = row.definition.scale
            parts.append(f"95% {format_change(row.low, scale)} to {format_change(row.high, scale)}")
    return ", ".join(parts)


def _causes(rows: Sequence[Verdict], edited: Sequence[str], *, is_any: bool) -> Iterator[tuple[str, str]]:
    """Yield the explanations that other lines do not contain, each part once; of several, with their metrics."""
    parts: dict[str, str] = {}
    for row in rows:
        if row.detail not in ("", *edited) and not (is_any and (not row.is_compared or row.detail in row.headline)):
            for part in dict.fromkeys(row.detail.split("; ")):
                parts[part] = f"{parts[part]}, {row.metric}" if part in parts else row.metric
    # What explains the same metrics is one line.
    for metrics in dict.fromkeys(parts.values()):
        text = "; ".join(part for part, of in parts.items() if of == metrics)
        yield "cause", text if len(rows) == 1 else f"{metrics}: {text}"


def _changed(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield what went down beside a regression: a collective that has gone may be its cause."""
    for row in comparison.rows:
        if row.outcome is Outcome.CHANGED:
            yield "changed", f"{row.metric} {row.change} ({row.both}){f': {row.reason}' if row.reason else ''}"


def _commands(comparison: Comparison, rows: Sequence[Verdict], again: Repeated) -> Iterator[tuple[str, str]]:
    """Yield the commands that confirm a change, find its commit, and accept it."""
    present = [row for row in rows if not row.is_lost]
    outcomes, reasons = {row.outcome for row in present}, {row.not_applicable for row in present}
    reasons |= {Reason.UNMARKED_CPU_TIMES for row in present if row.tolerance.origin is Origin.GROSS}
    version = next((row.reference.name for row in present if row.reference.is_ab), None)
    is_noisy, is_stored = any(row.low is not None for row in present), bool(comparison.baseline)
    if is_noisy and is_stored and not again.version:
        yield "confirm", again.in_pairs()
    elif Outcome.INCONCLUSIVE in outcomes:
        repeat = again.in_pairs if again.version else again.command
        yield "confirm", repeat("--aorta-max-launches=12")
    if is_stored and not again.version and not reasons.isdisjoint(DIFFERS):
        yield "compare", again.command("--aorta-ab=python:PATH")
    good = version or (again.commit[0] if again.commit else "")
    is_bisectable, ends = version is None and again.has_later, [good, "HEAD"]
    if version:
        side = parse_side(version)
        is_bisectable = side.commit == version != "HEAD" or (side.has_environment and not side.commit)
        if side.has_environment:
            ends = [version, shlex.join([f"python:{sys.executable}"]), "--over=packages"]
    if Outcome.REGRESSION in outcomes and is_stored and good and is_bisectable:
        yield "find", shlex.join(["aorta", "bisect", *ends, "--", again.test, *again.options])
    remedy = next((how for reason, how in _REMEDIES.items() if reason in reasons), None)
    is_accepted = len(present) < len(rows) or outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}
    if any(row.remedy for row in rows) or (is_stored and is_accepted):
        yield "accept", again.record()
    elif is_stored and remedy:
        label, text, command = remedy
        command = command and (Repeated.record if again.is_recording else command)
        # What runs in turn with another version already is compared if a marker asks for it.
        if text or not again.version:
            yield label, text + (command(again) if command else "")
