"""The outcome of a comparison, metric by metric, as plain values that are sent between processes."""

from collections.abc import Collection
from enum import StrEnum

from pytest_aorta.common.model import Model
from pytest_aorta.verdict.metrics import Origin, Tolerance, Value, format_value, metric_of
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.statistics.decision import Outcome, Scale


class ReferenceKind(StrEnum):
    """The kind of value that a verdict compares with."""

    BASELINE = "baseline"
    """The stored baseline."""
    AB = "A/B"
    """Launches of another variant or version in the same session block."""
    RESULTS = "results"
    """Another folder of results."""


class VerdictReference(Model, frozen=True):
    """The other side of a comparison.

    Attributes:
        kind: The kind of reference.
        name: File of the baseline, version of the A/B reference, or label of the results. Empty if the baseline does
            not exist, or if both sides of the A/B are variants of the test.
        revision: Revision of the baseline; None for any other kind.
    """

    kind: ReferenceKind
    name: str = ""
    revision: int | None = None

    @property
    def is_variant(self) -> bool:
        """Return True if both sides are variants that the test itself chose."""
        return self.kind is ReferenceKind.AB and not self.name

    def __str__(self) -> str:
        """Return the word for this side in a sentence."""
        if self.kind is ReferenceKind.RESULTS:
            return self.name
        return "reference" if self.kind is ReferenceKind.AB else "baseline"


class Missing(StrEnum):
    """The part that is missing from a comparison."""

    CANDIDATE_VALUE = "candidate value"
    """A launch lacks the metric, or a fact without which the metric can't be compared."""
    BASELINE = "baseline"
    """No baseline is stored for the case and config."""
    BASELINE_VALUE = "baseline value"
    """The baseline lacks the metric."""


class NotApplicable(StrEnum):
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
_UNASKED = (Origin.DEFAULT, Origin.UNDECLARED)
_ON_REQUEST = (NotApplicable.UNMARKED_CPU_TIMES, NotApplicable.NOT_REPRODUCIBLE, NotApplicable.UNDECLARED)
# Reasons that a fact differs from the other side, so that nobody chose to leave the metric out.
_DIFFERS = (NotApplicable.ENVIRONMENT, NotApplicable.VERSIONS)
# The outcomes that a reader must know about, the most urgent first.
FINDINGS = (Outcome.REGRESSION, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.IMPROVED)
# The label of a regression that its test has caught.
EXPECTED_REGRESSION = f"expected {Outcome.REGRESSION}"


class Verdict(Model, frozen=True):
    """The outcome for one metric.

    Attributes:
        case: The test's node id and the comparison's label.
        metric: Name of the metric.
        outcome: The outcome.
        value: The median over the candidate's launches.
        baseline: The value of the other side: the baseline center, or the median of the A/B reference.
        delta: The change on the metric's scale, e.g. 0.05 for 5%; positive if the value is larger.
        tolerance: The tolerance that was applied.
        reference: The other side of the comparison.
        missing: The part that is missing; None unless the outcome is ``missing``.
        not_applicable: The kind of reason; None unless the outcome is ``not applicable``.
        detail: An explanation of the outcome.
        low, high: The 95% interval of ``delta``.
        launches: Number of the candidate's launches that were used.
        is_open: True if more launches could decide the outcome.
        is_unrecorded: True if no baseline is stored for the case with this config and number of steps.
        has_other_steps: True if the baseline lacks this number of measured steps alone.
        is_expected: True for a regression whose error the test has caught, e.g. of a planted fault.
    """

    case: str
    metric: str
    outcome: Outcome
    value: Value
    baseline: Value
    delta: float | None
    tolerance: Tolerance
    reference: VerdictReference = VerdictReference(ReferenceKind.BASELINE)
    missing: Missing | None = None
    not_applicable: NotApplicable | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    launches: int = 1
    is_open: bool = False
    is_unrecorded: bool = False
    has_other_steps: bool = False
    is_expected: bool = False

    @property
    def is_finding(self) -> bool:
        """Return True if the outcome is one of :data:`FINDINGS` and the test has not caught it."""
        return self.outcome in FINDINGS and not self.is_expected

    @property
    def label(self) -> str:
        """Return the outcome as text, such as ``pass`` or ``expected regression``."""
        return EXPECTED_REGRESSION if self.is_expected else self.outcome.value

    @property
    def is_lost(self) -> bool:
        """Return True if the launch lacks the metric or a fact needed to compare it. This always fails the test."""
        return self.missing is Missing.CANDIDATE_VALUE

    @property
    def is_marked(self) -> bool:
        """Return True if a marker names the metric, so that the test is about this metric."""
        return self.tolerance.origin is Origin.MARKER

    @property
    def is_left_out(self) -> bool:
        """Return True if the metric was not compared, and not because of a profiler, which the user asked for."""
        return self.not_applicable not in (None, NotApplicable.PROFILER)

    @property
    def is_elsewhere(self) -> bool:
        """Return True if the metric was not compared because the versions or the device differ."""
        return self.not_applicable in _DIFFERS

    @property
    def is_refused(self) -> bool:
        """Return True if a marker asks for the metric and it can't be compared. This always fails the test."""
        return self.is_left_out if self.is_marked else self.tolerance.origin is Origin.NUMERICS and self.is_elsewhere

    def is_one_of(self, outcomes: Collection[Outcome]) -> bool:
        """Return True if the outcome is in ``outcomes``, such as those of ``--aorta-fail-on``, and was requested."""
        # Neither a marker nor the workload's config asks for the comparison.
        is_unrequested = self.not_applicable in _ON_REQUEST and self.tolerance.origin in _UNASKED
        return self.outcome in outcomes and not is_unrequested

    @property
    def is_beyond(self) -> bool:
        """Return True if the metric got worse by more than the tolerance, decided or not."""
        worse = metric_of(self.metric, self.tolerance.direction).worse
        return self.delta is not None and worse * self.delta > (self.tolerance.value or 0.0)

    @property
    def is_by_ab(self) -> bool:
        """Return True if launches of an A/B reference decided the outcome, not the stored baseline."""
        return self.reference.kind is ReferenceKind.AB

    @property
    def reason(self) -> str:
        """Return text with the version of an A/B reference, the explanation, and how to record a missing baseline."""
        version = f"A/B with {self.reference.name}" if self.is_by_ab and self.reference.name else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return ", ".join(filter(None, [version, self.detail])) + remedy

    @property
    def remedy(self) -> str:
        """Return how to get a baseline if none applies; empty for any other verdict or kind of reference."""
        if not self.is_unrecorded or self.reference.kind is not ReferenceKind.BASELINE:
            return ""
        if self.has_other_steps:
            return f"if this is intended, replace it with {RESET}"
        return f"record {'one' if self.reference.revision is None else 'it again'} with --update-baselines"

    def cells(self) -> tuple[str, ...]:
        """Return a row of a table: verdict, metric, both values, change, limit."""
        return self.label, self.metric, self.both, self.change, str(self.tolerance)

    def values(self) -> tuple[str, str]:
        """Return the value of the other side and that of the launches under test, as text with the unit."""
        unit, is_exact = metric_of(self.metric).unit, self.tolerance.is_exact
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
        scale = metric_of(self.metric).scale
        text = format_change(self.delta, scale)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{format_change(self.low, scale)}, {format_change(self.high, scale)}]"

    @property
    def headline(self) -> str:
        """Return the verdict, the metric and its change in one line, or why there is no change to show."""
        start = f"{self.label.capitalize()}: {self.metric}"
        if self.outcome in (Outcome.MISSING, Outcome.NOT_APPLICABLE):
            return f"{start}, {self.reason}" if self.reason else start
        change = "" if self.delta is None else f" {format_change(self.delta, metric_of(self.metric).scale)}"
        return f"{start}{change} ({self.both}, limit {self.tolerance})"

    def __repr__(self) -> str:
        """Return the headline, which pytest shows in a failed assertion."""
        return f"<{self.headline}>"

    def __str__(self) -> str:
        """Return the headline and the reason in one line."""
        line = self.headline
        return line if not self.reason or line.endswith(self.reason) else f"{line}; {self.reason}"


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
    notes: tuple[str, ...] = ()
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
        return any(row.is_open and (row.is_beyond or not has_failed) for row in self.rows)

    @property
    def decided(self) -> dict[str, Verdict]:
        """Return the verdicts that further launches do not change."""
        return {row.metric: row for row in self.rows if not row.is_open}

    def failing(self, fail_on: Collection[Outcome] = (), of_marked: Collection[Outcome] = ()) -> list[Verdict]:
        """Return the verdicts that fail the test: regressions, lost or refused metrics, and outcomes in ``fail_on``.

        The outcomes in ``of_marked`` fail the test for metrics that a marker names. A metric that is not applicable
        because nothing asks for its comparison does not fail the test.
        """

        def fails(row: Verdict) -> bool:
            # A metric that the launch itself lost fails the test even if missing baselines do not.
            outcomes = {Outcome.REGRESSION, *fail_on, *(of_marked if row.is_marked else ())}
            return row.is_one_of(outcomes) or row.is_lost or row.is_refused

        return list(filter(fails, self.rows))


def format_change(change: float, scale: Scale = Scale.RELATIVE) -> str:
    """Return a change as text in the unit of its scale. Smaller changes have more decimals."""
    percent = 100 * change
    digits = 2 if abs(percent) < 0.995 else 1 if abs(percent) < 99.95 else 0
    # Of an exact metric, the smallest change counts.
    shown = f"{percent:+.1g}" if 0 < abs(percent) < 0.005 else f"{percent:+.{digits}f}"
    return shown + scale.unit
