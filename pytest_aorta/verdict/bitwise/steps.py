"""Bitwise comparison of two results, step by step. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_aorta.result.facts import launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.verdict.applicability import other_machine, other_settings
from pytest_aorta.verdict.metrics import METRICS, Origin, Tolerance, check_compared
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference

Bits: TypeAlias = Mapping[int, str | float]
_EXACT, _REFERENCE = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)


@dataclass(frozen=True)
class StepMetric:
    """A value that a result contains for each step; ``remedy`` says how to record it for all steps."""

    name: str
    bits: Callable[[WorkloadResult], Bits]
    remedy: str


# In the order in which a step computes them.
STEP_METRICS = {
    row.name: row
    for row in (
        StepMetric("loss", lambda result: dict(enumerate(result.loss, 1)), "recorder.loss(value) in each step"),
        StepMetric(
            "grad_norm", lambda result: dict(enumerate(result.grad_norm, 1)), "recorder.grad_norm(value) in each step"
        ),
        StepMetric(
            "weight_hash",
            lambda result: {int(step): value for step, value in result.weight_hashes.items()},
            "config hash_every=1, or recorder.weight_hash(step, value) after each step",
        ),
    )
}


@dataclass(frozen=True)
class Difference:
    """The first difference: the step, counted from 1, and the metric that differs first in the step."""

    step: int
    metric: str


def from_first_step(steps: int) -> dict[str, Any]:
    """Return the config that makes a workload measure and hash its first ``steps`` steps."""
    return {"steps": steps, "warmup": 0, "hash_every": 1}


def split(metrics: Collection[str] | None) -> tuple[list[str], list[str]]:
    """Split the metrics to compare into metrics of steps and of whole launches; None selects all metrics of steps.

    Raises:
        SpecError: ``metrics`` is empty, or a metric is unknown.
    """
    if metrics is None:
        return list(STEP_METRICS), []
    known = [*STEP_METRICS, *(name for name in METRICS if name not in STEP_METRICS)]
    check_compared(metrics, known)
    by_step = [name for name in STEP_METRICS if name in metrics]
    return by_step, [name for name in METRICS if name in metrics and name not in by_step]


def compare_steps(
    case: str, candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> tuple[Verdict, ...]:
    """Return one verdict per metric on the bits of the first ``steps`` measured steps.

    The verdict is *missing* if a side lacks some of these steps, and *not applicable* if both the values and the
    machines, or the versions installed there, differ.
    """
    return tuple(_compare(case, STEP_METRICS[name], candidate, reference, steps) for name in metrics)


def first_difference(
    candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> Difference | None:
    """Return the earliest step that differs, with the differing metric that it computes first, or None."""
    for step in range(1, steps + 1):
        for row in STEP_METRICS.values():
            here, there = row.bits(candidate), row.bits(reference)
            if row.name in metrics and step in here and step in there and not _is_same(here[step], there[step]):
                return Difference(step, row.name)
    return None


def _compare(case: str, row: StepMetric, candidate: WorkloadResult, reference: WorkloadResult, steps: int) -> Verdict:
    here, there = row.bits(candidate), row.bits(reference)

    def verdict(outcome: Outcome, detail: str, shown: int | None = None, **reason: Any) -> Verdict:
        """Return a verdict that shows the values of step ``shown``."""
        value, other = (None, None) if shown is None else (here[shown], there[shown])
        return Verdict(case, row.name, outcome, value, other, None, _EXACT, _REFERENCE, detail=detail, **reason)

    for side, result, held in (("candidate", candidate, here), ("reference", reference, there)):
        if absent := [step for step in range(1, steps + 1) if step not in held]:
            detail = _absence(side, result, row, absent, steps)
            return verdict(Outcome.MISSING, detail, missing=Missing.CANDIDATE_VALUE)
    if not (different := [step for step in range(1, steps + 1) if not _is_same(here[step], there[step])]):
        return verdict(Outcome.PASS, f"all {steps} steps" if steps > 1 else "the step", steps)
    facts, others = launch_facts(candidate), launch_facts(reference)
    if other := other_machine(facts, others, str(_REFERENCE)):
        return verdict(Outcome.NOT_APPLICABLE, other, different[0], not_applicable=NotApplicable.ENVIRONMENT)
    details = [f"first in step {different[0]}, in {len(different)} of {steps} steps", other_settings(facts, others)]
    if not all(result.environment.get("bitwise_reproducible", True) for result in (candidate, reference)):
        details.append(
            "not bitwise reproducible here, so the difference may be chance: run both in their deterministic mode"
        )
    return verdict(Outcome.REGRESSION, "; ".join(filter(None, details)), different[0])


def _absence(side: str, result: WorkloadResult, row: StepMetric, absent: list[int], steps: int) -> str:
    remedy = row.remedy
    if result.total_iterations < steps:
        remedy = f"config steps={steps}; it measured {result.total_iterations}"
    held = f"{steps - len(absent)} of steps 1 to {steps}"
    return f"the {side} has values for {held}, but not for step {absent[0]}; use {remedy}"


def _is_same(one: str | float, other: str | float) -> bool:
    # Compare bits, because 0.0 == -0.0.
    return one.hex() == other.hex() if isinstance(one, float) and isinstance(other, float) else one == other
