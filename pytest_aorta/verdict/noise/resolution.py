"""The resolution of a baseline: the tolerances that its noise allows, and the remedy if it is too noisy."""

from __future__ import annotations

import math
from collections.abc import Hashable

from pytest_aorta.common.text import counted
from pytest_aorta.verdict.metrics import Metric, Origin, Tolerance
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.stored import RESOLVED_BY, least_tolerance
from pytest_aorta.verdict.statistics.variance import Estimate
from pytest_aorta.verdict.verdicts import format_change

RESET = "--update-baselines --aorta-record=replace"
# Limits for widening the default tolerance of a fraction or of an exposed time, so that a lost overlap does not pass.
WIDEST = {Scale.POINTS: 0.05, Scale.OF_STEP: 0.02}
# The most launches that --aorta-launches records.
_MOST_LAUNCHES = 50


def allowed_tolerance(metric: Metric, tolerance: Tolerance, stored: Estimate) -> Tolerance:
    """Return the tolerance. A default tolerance is widened until the noise of the stored launches allows a decision.

    A default tolerance of a fraction or of an exposed time is widened to at most :data:`WIDEST`.
    """
    if tolerance.origin is not Origin.DEFAULT or tolerance.value is None:
        return tolerance
    least, widest = _needed(metric, stored), WIDEST.get(metric.scale, math.inf)
    if least <= tolerance.value:
        return tolerance
    return Tolerance(min(math.ceil(least * 100) / 100, widest), metric.scale, Origin.WIDENED)


def too_noisy(metric: Metric, tolerance: Tolerance, stored: Estimate) -> str | None:
    """Return the problem if the stored launches need a tolerance above the limit of a default tolerance, or None.

    ``tolerance`` is the tolerance before widening.
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
    """Return the remedy if noise of the stored launches may keep unchanged code from passing, or None.

    ``tolerance`` is the tolerance after widening, and ``block`` is the session block of the launches to compare.
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
