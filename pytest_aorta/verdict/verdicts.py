"""The outcome of a comparison, metric by metric, as plain values that are sent between processes."""

from collections.abc import Collection
from enum import StrEnum
from typing import ClassVar, TypeAlias

from pytest_aorta.common.model import Model
from pytest_aorta.verdict.metrics import Metric, Origin, Tolerance, Value, format_value, metric_of
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.statistics.decision import Outcome, Scale


class ReferenceKind(StrEnum):
    """The kind of value that a verdict compares with."""

    BASELINE = "baseline"
    """The stored baseline."""
    AB = "A/B"
    """Launches of another variant or version in the same session block."""


class VerdictReference(Model, frozen=True):
    """The other side of a comparison.

    Attributes:
        kind: The kind of reference.
        name: File of the baseline, or version of the A/B reference. Empty if the baseline does not exist, or if both
            sides of the A/B are variants of the test.
        revision: Revision of the baseline; None for any other kind.
    """

    kind: ReferenceKind
    name: str = ""
    revision: int | None = None

    @property
    def is_variant(self) -> bool:
        """Return True if both sides are variants that the test itself chose."""
        return self.is_ab and not self.name

    @property
    def is_ab(self) -> bool:
        """Return True if the other side was launched in turn with the candidate."""
        return self.kind is ReferenceKind.AB

    def __str__(self) -> str:
        """Return the word for this side in a sentence."""
        return "reference" if self.is_ab else "baseline"


class MissingPart(StrEnum):
    """The part that is missing from a comparison."""

    CANDIDATE_VALUE = "candidate value"
    """A launch lacks the metric, or a fact without which the metric can't be compared."""
    BASELINE = "baseline"
    """No baseline is stored for the case and config."""
    BASELINE_VALUE = "baseline value"
    """The baseline lacks the metric."""


class Unrecorded(StrEnum):
    """The launches of which no baseline is stored."""

    CASE = "case"
    """Those of the case with this config."""
    STEPS = "steps"
    """Those with this number of measured steps alone."""


class Reason(StrEnum):
    """The general reason why a metric can't be compared; the verdict's detail contains the values of a launch."""

    PROFILER = "profiler"
    HEAD_START = "no head start"
    TRACE = "no profile"
    LAUNCHER = "other launcher"
    UNMARKED_CPU_TIMES = "CPU timing"
    OLD_CPU_TIMES = "CPU timing of another hour or machine"
    VERSIONS = "other torch"
    NOT_REPRODUCIBLE = "not deterministic"
    ENVIRONMENT = "other versions or device"
    NOISY = "noisy baseline"
    UNDECLARED = "no tolerance"


# Reasons for which a metric is compared only if a marker names it, or if the workload is deterministic.
_UNASKED = (Origin.DEFAULT, Origin.GROSS, Origin.UNDECLARED)
_ON_REQUEST = (Reason.UNMARKED_CPU_TIMES, Reason.NOT_REPRODUCIBLE, Reason.UNDECLARED)
# Reasons that a fact differs from the other side, so that nobody chose to leave the metric out.
DIFFERS = (Reason.ENVIRONMENT, Reason.VERSIONS)
# The outcomes that a reader must know about, the most urgent first.
FINDINGS = (Outcome.REGRESSION, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.IMPROVED)
# The label of a regression that its test has caught.
EXPECTED_REGRESSION = f"expected {Outcome.REGRESSION}"


class Decided(Model, frozen=True, tag="decided"):
    """The state of a metric that was compared, and that further launches do not change.

    Attributes:
        outcome: Pass, regression, improved, changed or inconclusive.
        is_expected: True for a regression whose error the test has caught, e.g. of a planted fault.
    """

    outcome: Outcome
    is_expected: bool = False


class Open(Model, frozen=True, tag="open"):
    """The state of a metric that was compared, and that more launches could decide."""

    outcome: ClassVar[Outcome] = Outcome.INCONCLUSIVE


class Missing(Model, frozen=True, tag="missing"):
    """The state of a metric that one side lacks.

    Attributes:
        part: The part that is missing.
        unrecorded: What has to be recorded before the metric can be compared; None if the stored baseline is that of
            the launches, or if the other side is no baseline.
    """

    outcome: ClassVar[Outcome] = Outcome.MISSING
    part: MissingPart
    unrecorded: Unrecorded | None = None


class NotApplicable(Model, frozen=True, tag="not applicable"):
    """The state of a metric that can't be compared between these launches.

    Attributes:
        reason: The kind of reason.
    """

    outcome: ClassVar[Outcome] = Outcome.NOT_APPLICABLE
    reason: Reason


State: TypeAlias = Decided | Open | Missing | NotApplicable


class Verdict(Model, frozen=True):
    """The outcome for one metric.

    Attributes:
        case: The test's node id and the comparison's label.
        metric: Name of the metric.
        state: What is decided, or why nothing is; its ``type`` is ``decided``, ``open``, ``missing`` or
            ``not applicable``.
        value: The median over the candidate's launches.
        baseline: The value of the other side: the baseline center, or the median of the A/B reference.
        delta: The change on the metric's scale, e.g. 0.05 for 5%; positive if the value is larger.
        tolerance: The tolerance that was applied.
        reference: The other side of the comparison.
        detail: An explanation of the outcome.
        low, high: The 95% interval of ``delta``.
        launches: Number of the candidate's launches that were used.
    """

    case: str
    metric: str
    state: State
    value: Value
    baseline: Value
    delta: float | None
    tolerance: Tolerance
    reference: VerdictReference = VerdictReference(ReferenceKind.BASELINE)
    detail: str = ""
    low: float | None = None
    high: float | None = None
    launches: int = 1

    @property
    def definition(self) -> Metric:
        """Return the row of the metric in the table of metrics, or one for a metric that ranks record."""
        return metric_of(self.metric, self.tolerance.direction)

    @property
    def outcome(self) -> Outcome:
        """Return the outcome; that of an open comparison is inconclusive."""
        return self.state.outcome

    @property
    def is_expected(self) -> bool:
        """Return True for a regression whose error the test has caught."""
        return isinstance(self.state, Decided) and self.state.is_expected

    @property
    def is_finding(self) -> bool:
        """Return True if the outcome is one of :data:`FINDINGS` and the test has not caught it.

        A time that nobody asked for is none while it is open, as where another metric has failed the test.
        """
        is_unasked = self.tolerance.origin is Origin.GROSS and self.outcome is Outcome.INCONCLUSIVE
        return self.outcome in FINDINGS and not self.is_expected and not is_unasked

    @property
    def is_compared(self) -> bool:
        """Return True if the metric was compared, whether its outcome is decided or open."""
        return isinstance(self.state, Decided | Open)

    @property
    def is_within_limit(self) -> bool:
        """Return True for a cost of a step that changed, and by no more than its tolerance."""
        return self.outcome is Outcome.PASS and bool(self.delta) and self.definition.cost is not None

    @property
    def is_lost(self) -> bool:
        """Return True if the launch lacks the metric or a fact needed to compare it. This always fails the test."""
        return isinstance(self.state, Missing) and self.state.part is MissingPart.CANDIDATE_VALUE

    @property
    def not_applicable(self) -> Reason | None:
        """Return the reason why the metric can't be compared, or None."""
        return self.state.reason if isinstance(self.state, NotApplicable) else None

    @property
    def label(self) -> str:
        """Return the outcome as text, such as ``pass`` or ``expected regression``."""
        return EXPECTED_REGRESSION if self.is_expected else self.outcome.value

    def fails(self, fail_on: Collection[Outcome] = (), of_marked: Collection[Outcome] = ()) -> bool:
        """Return True if the verdict fails its test, as in :meth:`Verdicts.failing`."""
        origin = self.tolerance.origin
        is_listed = self.outcome in fail_on or (origin is Origin.MARKER and self.outcome in of_marked)
        match self.state:
            case Missing(part=MissingPart.CANDIDATE_VALUE):
                return True
            case NotApplicable(reason=reason) if reason is not Reason.PROFILER:
                # What a marker names has to be compared; nothing asks for some of the others.
                is_refused = origin is Origin.MARKER or (origin is Origin.NUMERICS and reason in DIFFERS)
                return is_refused or (is_listed and not (reason in _ON_REQUEST and origin in _UNASKED))
        return is_listed or self.outcome is Outcome.REGRESSION

    @property
    def reason(self) -> str:
        """Return text with the version of an A/B reference, the explanation, and how to record a better baseline."""
        version = f"A/B with {self.reference.name}" if self.reference.is_ab and self.reference.name else ""
        is_stale = self.outcome is Outcome.IMPROVED and self.reference.kind is ReferenceKind.BASELINE
        advice = f"the baseline is stale; record the better value with {RESET}" if is_stale else self.remedy
        return "; ".join(filter(None, [", ".join(filter(None, [version, self.detail])), advice]))

    @property
    def remedy(self) -> str:
        """Return how to get a baseline if none applies; empty for any other verdict or kind of reference."""
        match self.state:
            case Missing(unrecorded=Unrecorded.STEPS):
                return f"if this is intended, replace it with {RESET}"
            case Missing(unrecorded=Unrecorded.CASE):
                return f"record {'one' if self.reference.revision is None else 'it again'} with --update-baselines"
        return ""

    def values(self) -> tuple[str, str]:
        """Return the value of the other side and that of the launches under test, as text with the unit."""
        unit, is_exact = self.definition.unit, self.tolerance.is_exact
        return format_value(self.baseline, unit, exact=is_exact), format_value(self.value, unit, exact=is_exact)

    @property
    def both(self) -> str:
        """Return both values as text, with one unit."""
        there, here = self.values()
        number, _, unit = there.rpartition(" ")
        return f"{number if number and here.endswith(f' {unit}') else there} -> {here}"

    @property
    def change(self) -> str:
        """Return the change as text, with its interval if the interval is known."""
        if self.delta is None:
            return "-"
        scale = self.definition.scale
        text = format_change(self.delta, scale)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{format_change(self.low, scale)}, {format_change(self.high, scale)}]"

    @property
    def headline(self) -> str:
        """Return the verdict, the metric and its change in one line, or why there is no change to show."""
        start = f"{self.label.capitalize()}: {self.metric}"
        if not self.is_compared:
            return f"{start}, {self.reason}" if self.reason else start
        change = "" if self.delta is None else f" {format_change(self.delta, self.definition.scale)}"
        # The parts of a cost that differ may add up to the same number.
        if self.outcome is Outcome.REGRESSION and not self.delta and self.delta is not None:
            change = f": {self.detail}"
        return f"{start}{change} ({self.both}, limit {self.tolerance})"

    def __repr__(self) -> str:
        """Return the headline, which pytest shows in a failed assertion."""
        return f"<{self.headline}>"

    def __str__(self) -> str:
        """Return the headline and the reason in one line."""
        headline = self.headline
        return f"{headline}; {self.reason}" if self.is_compared and self.reason not in headline else headline


class NoteKind(StrEnum):
    """The kind of a note, by its label in the text of a failure."""

    EDIT = "edited"
    """A sentence on what was edited."""
    MOVED = "moved"
    """The class of the cause, such as another environment."""
    CAUSE = "cause"
    """An explanation of the verdicts."""
    NOTE = "note"
    """A line on what was measured or left out; it explains no verdict."""
    WARNING = "warning"
    """A line on what puts in doubt that the test measures what it should."""


class Note(Model, frozen=True):
    """A line on a comparison's launches."""

    text: str
    kind: NoteKind = NoteKind.CAUSE

    def __str__(self) -> str:
        """Return the line."""
        return self.text


class Verdicts(Model, frozen=True):
    """All verdicts of one comparison, with notes on its launches.

    Attributes:
        case: The test's node id and the comparison's label.
        rows: One verdict per metric.
        notes: Lines that explain the verdicts, such as the straggler.
        suspect: The rank that explains a slower step; None if no rank does.
    """

    case: str
    rows: tuple[Verdict, ...]
    notes: tuple[Note, ...] = ()
    suspect: int | None = None

    def __repr__(self) -> str:
        """Return the headlines, which pytest shows in a failed assertion."""
        return f"<{self.case}: {'; '.join(row.headline for row in self.rows)}>"

    def __getitem__(self, metric: str) -> Verdict:
        """Return the verdict of one metric.

        Raises:
            KeyError: The metric was not compared.
        """
        rows = {row.metric: row for row in self.rows}
        if metric not in rows:
            raise KeyError(f"{metric} was not compared; compared were {sorted(rows)}")
        return rows[metric]

    @property
    def need_launches(self) -> bool:
        """Return True if another launch could change the outcome of the test, or show that another metric got worse."""
        has_failed = any(row.outcome is Outcome.REGRESSION or row.is_lost for row in self.rows)

        def is_beyond(row: Verdict) -> bool:
            return row.delta is not None and row.definition.worse * row.delta > (row.tolerance.value or 0.0)

        return any(isinstance(row.state, Open) and (not has_failed or is_beyond(row)) for row in self.rows)

    @property
    def decided(self) -> dict[str, Verdict]:
        """Return the verdicts that further launches do not change."""
        return {row.metric: row for row in self.rows if not isinstance(row.state, Open)}

    def failing(self, fail_on: Collection[Outcome] = (), of_marked: Collection[Outcome] = ()) -> list[Verdict]:
        """Return the verdicts that fail the test: regressions, lost or refused metrics, and outcomes in ``fail_on``.

        The outcomes in ``of_marked`` fail the test for metrics that a marker names. A metric that is not applicable
        because nothing asks for its comparison does not fail the test.
        """
        return [row for row in self.rows if row.fails(fail_on, of_marked)]


def format_change(change: float, scale: Scale = Scale.RELATIVE) -> str:
    """Return a change as text in the unit of its scale. Smaller changes have more decimals."""
    percent = 100 * change
    digits = 2 if abs(percent) < 0.995 else 1 if abs(percent) < 99.95 else 0
    # Of an exact metric, the smallest change counts.
    shown = f"{percent:+.1g}" if 0 < abs(percent) < 0.005 else f"{percent:+.{digits}f}"
    return shown + scale.unit
