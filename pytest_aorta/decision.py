"""The rule that turns a value, its baseline and a tolerance into a verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pytest_aorta.metrics import Metric, Tolerance


class Outcome(StrEnum):
    """What a comparison can come to."""

    PASS = "pass"  # noqa: S105 - a verdict
    REGRESSION = "regression"
    IMPROVED = "improved"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"
    MISSING = "missing"


@dataclass(frozen=True)
class Decision:
    """An outcome with the centre of the baseline and the relative change (positive: the value is larger)."""

    outcome: Outcome
    baseline: float | str
    delta: float | None


def decide(metric: Metric, value: float | str, baseline: Sequence[float | str], tolerance: Tolerance) -> Decision:
    """Compare ``value`` with the median of the baseline's launches, or bit for bit where ``tolerance`` is exact.

    A change for the worse beyond the tolerance is a regression, one for the better is improved. Raises ValueError
    for an empty baseline.
    """
    if not baseline:
        raise ValueError("a decision needs at least one baseline value")
    if tolerance.relative is None or isinstance(value, str):
        odd = next((other for other in baseline if other != value), None)
        return Decision(Outcome.PASS if odd is None else Outcome.REGRESSION, value if odd is None else odd, None)
    centre = median(float(other) for other in baseline)
    if centre == 0:
        # No change is small against nothing, so that the sign alone decides.
        delta, change, allowed = None, value, 0.0
    else:
        delta = change = (value - centre) / abs(centre)
        allowed = tolerance.relative
    worse = -change if metric.direction == "higher" else change
    # Asked this way round, a value that is no number never passes.
    outcome = Outcome.PASS if abs(worse) <= allowed else Outcome.IMPROVED if worse < 0 else Outcome.REGRESSION
    return Decision(outcome, centre, delta)
