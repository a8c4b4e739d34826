"""Head start of the host over the device, so that profiled steps show the overlap that their dependencies allow.

A late host delays kernel launches and exposes communication that its device would otherwise hide. A spin kernel on the
training stream holds the device back until the host has enqueued the profiled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_aorta.result.trace.profiled_steps import HeadStart, StepOverlap

# Steps of one head start. A device queues a limited number of launches, so the host cannot run ahead of many steps.
MAX_STEPS = 2
MAX_ATTEMPTS = 3
# A step counts as blocked after this many blocked attempts; a late host can also cause a single blocked attempt.
BLOCKED_ATTEMPTS = 2
# Ratio of a lead to the time in which the host enqueued the same steps without a lead.
MARGIN = 1.5
MIN_LEAD_MS = 20.0
MAX_LEAD_MS = 2_000.0
# Profiled steps whose median is at most this many times the median timed step were not delayed.
MAX_STEP_RATIO = 1.03
# Allowed idle time of a step beyond that of the least idle step, as a fraction of the step's time.
MAX_EXTRA_IDLE = 0.03


@dataclass(frozen=True)
class Pass:
    """Times of one pass over the profiled steps on the host, in milliseconds since the spin kernel was enqueued.

    Attributes:
        first_boundary_ms: Time at which the host had enqueued the step before the first boundary.
        host_ms: Time at which the host had enqueued the last boundary.
    """

    first_boundary_ms: float
    host_ms: float


def first_lead_ms(host_ms: float) -> float:
    """Return the first lead to try for steps that the host enqueued in ``host_ms`` without a lead."""
    return min(max(MARGIN * host_ms, MIN_LEAD_MS), MAX_LEAD_MS)


def next_lead_ms(lead_ms: float) -> float:
    """Return the lead to try after ``lead_ms`` was too short; equal to ``lead_ms`` at the cap."""
    return min(2 * lead_ms, MAX_LEAD_MS)


def parts_of(num_steps: int) -> list[int]:
    """Return the numbers of steps, at most :data:`MAX_STEPS` each, that get head starts of their own."""
    whole, rest = divmod(num_steps, MAX_STEPS)
    return [MAX_STEPS] * whole + [rest] * (rest > 0)


def judge(
    steps: Sequence[StepOverlap], passed: Pass, lead_ms: float, timed_ms: float | None, blocking_call: str | None
) -> HeadStart:
    """Judge whether profiled ``steps`` ran with the host ahead, and return the head start of this attempt.

    Args:
        steps: The profiled steps of this rank.
        passed: Times of the host during these steps.
        lead_ms: The spin kernel's duration.
        timed_ms: Median duration of the timed steps; None: unknown, so that no step counts as slow.
        blocking_call: The runtime call with which a step waits for the device, if the trace shows one. The host then
            can't enqueue the next step while the spin kernel runs.
    """
    is_blocked = blocking_call is not None and passed.first_boundary_ms >= lead_ms
    ratio = median(step.step_ms for step in steps) / timed_ms if timed_ms else None
    least_idle_ms = min(step.idle_ms for step in steps)
    is_idle = any(step.idle_ms > least_idle_ms + MAX_EXTRA_IDLE * step.step_ms for step in steps)
    is_slow = ratio is not None and ratio > MAX_STEP_RATIO
    return HeadStart(
        lead_ms=lead_ms,
        attempts=1,
        step_ratio=ratio,
        succeeded=not (is_blocked or is_idle or is_slow),
        blocked_by=blocking_call if is_blocked else None,
    )
