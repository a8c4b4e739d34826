"""The noise of a baseline: what it allows to decide, and what to do where it allows nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable

from pytest_aorta.common.text import counted
from pytest_aorta.verdict.metrics import Metric, Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import RESOLVED_BY, least_tolerance
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Estimate
from pytest_aorta.verdict.verdicts import format_change

RESET = "--update-baselines --aorta-reset-baselines"
# The widest that a default tolerance of a fraction or of an exposed time gets, so that a lost overlap does not pass.
WIDEST = {Scale.POINTS: 0.05, Scale.OF_STEP: 0.02}
# The most launches that --aorta-launches records.
_MOST_LAUNCHES = 50


def allowed_tolerance(metric: Metric, tolerance: Tolerance, stored: Estimate) -> Tolerance:
    """Return the tolerance, with a default one widened until the noise of the stored launches allows a decision.

    A default tolerance of a fraction or of an exposed time is widened to at most :data:`WIDEST`.
    """
    if tolerance.origin is not Origin.DEFAULT or tolerance.value is None:
        return tolerance
    least, widest = _needed(metric, stored), WIDEST.get(metric.scale, math.inf)
    if least <= tolerance.value:
        return tolerance
    return Tolerance(min(math.ceil(least * 100) / 100, widest), metric.scale, Origin.WIDENED)


def too_noisy(metric: Metric, tolerance: Tolerance, stored: Estimate) -> str | None:
    """Return the problem with stored launches that need a wider tolerance than a default one may get, or None.

    ``tolerance`` is the one before it is widened.
    """
    least, widest = _needed(metric, stored), WIDEST.get(metric.scale, math.inf)
    if tolerance.origin is not Origin.DEFAULT or least <= widest:
        return None
    deviation = metric.scale.change(math.sqrt(stored.variance.within.value))
    deviation_text, needed = (format_change(change, metric.scale).lstrip("+") for change in (deviation, least))
    return (
        f"standard deviation of the baseline's launches is {deviation_text}, which needs a tolerance of {needed}, but "
        f"a default tolerance is at most {metric.scale.text(widest)}"
    )


def unresolved(
    metric: Metric, tolerance: Tolerance, stored: Estimate, block: Hashable, max_launches: int
) -> str | None:
    """Return the remedy where unchanged code may not pass for the noise of the stored launches, or None.

    ``tolerance`` is the one after it is widened, and ``block`` the session block of the launches to compare.
    """
    scale, have = metric.scale, sum(stored.counts.values())
    allowed = tolerance.value or 0.0

    def needed(count: int) -> float:
        return least_tolerance(
            stored.with_launches(count), block, max_launches=max_launches, relative=scale is Scale.RELATIVE
        )

    if needed(have) <= allowed:
        return None
    enough = next((count for count in range(have + 1, _MOST_LAUNCHES + 1) if needed(count) <= allowed), None)
    if enough is not None:
        more = counted(enough - have, "more launch")
        return f"record {more} ({RESET} --aorta-launches={enough}): the baseline's {have} cannot resolve {tolerance}"
    wider = scale.text(math.ceil(needed(have) * 100) / 100)
    return (
        f"no number of launches recorded at once resolves {tolerance}; set a tolerance of {wider}, or compare with "
        "another version side by side (--aorta-ab)"
    )


def _needed(metric: Metric, stored: Estimate) -> float:
    return metric.scale.change(RESOLVED_BY * math.sqrt(stored.variance.within.value))
