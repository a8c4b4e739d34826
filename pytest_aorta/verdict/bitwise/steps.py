"""Two results compared bit for bit, step by step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.facts import launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.verdict.applicability import other_environment
from pytest_aorta.verdict.metrics import METRICS, Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Missing, ReferenceKind, Verdict, VerdictReference

Bits: TypeAlias = Mapping[int, str | float]


@dataclass(frozen=True)
class StepMetric:
    """What a result holds for each step; ``remedy`` says how to have it for all steps."""

    name: str
    bits: Callable[[WorkloadResult], Bits]
    remedy: str


# In the order in which a step makes them.
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
    """The first one: a step, counted from 1, and what differs there first."""

    step: int
    metric: str


def from_first_step(steps: int) -> dict[str, Any]:
    """The config with which a workload measures, and hashes, its first ``steps`` steps."""
    return {"steps": steps, "warmup": 0, "hash_every": 1}


def split(metrics: Collection[str] | None) -> tuple[list[str], list[str]]:
    """The metrics of each step to compare, and those of whole launches.

    Raises:
        SpecError: there is no such metric.
    """
    if metrics is None:
        return list(STEP_METRICS), []
    if unknown := sorted(set(metrics) - STEP_METRICS.keys() - METRICS.keys()):
        raise SpecError(
            f"compare: metrics {unknown} are unknown; allowed are {sorted(STEP_METRICS.keys() | METRICS.keys())}"
        )
    by_step = [name for name in STEP_METRICS if name in metrics]
    return by_step, [name for name in METRICS if name in metrics and name not in by_step]


def compare_steps(
    case: str, candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> tuple[Verdict, ...]:
    """One verdict a metric, about the bits of the first ``steps`` measured steps.

    *missing* where one of the two does not have them all, *not applicable* where they differ and so do their numeric
    environments.
    """
    return tuple(_compare(case, STEP_METRICS[name], candidate, reference, steps) for name in metrics)


def first_difference(
    candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> Difference | None:
    """Where the two part: the earliest step, and in it the metric that a step makes first."""
    for step in range(1, steps + 1):
        for row in STEP_METRICS.values():
            here, there = row.bits(candidate), row.bits(reference)
            if row.name in metrics and step in here and step in there and not _is_same(here[step], there[step]):
                return Difference(step, row.name)
    return None


def _compare(case: str, row: StepMetric, candidate: WorkloadResult, reference: WorkloadResult, steps: int) -> Verdict:
    exact, reference_kind = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)
    blank = Verdict(case, row.name, Outcome.MISSING, None, None, None, exact, reference_kind)
    here, there = row.bits(candidate), row.bits(reference)
    for side, result, held in (("candidate", candidate, here), ("reference", reference, there)):
        if absent := [step for step in range(1, steps + 1) if step not in held]:
            return replace(blank, missing=Missing.CANDIDATE_VALUE, detail=_absence(side, result, row, absent, steps))
    if not (different := [step for step in range(1, steps + 1) if not _is_same(here[step], there[step])]):
        same = f"all {steps} steps" if steps > 1 else "the step"
        return replace(blank, outcome=Outcome.PASS, value=here[steps], baseline=there[steps], detail=same)
    shown = replace(blank, value=here[different[0]], baseline=there[different[0]])
    if detail := other_environment(launch_facts(candidate), launch_facts(reference)):
        return replace(shown, outcome=Outcome.NOT_APPLICABLE, detail=detail)
    detail = f"first in step {different[0]}, in {len(different)} of {steps} steps"
    if not all(result.environment.get("bitwise_reproducible", True) for result in (candidate, reference)):
        detail += "; not bitwise reproducible here, so it may be chance: run both in their deterministic mode"
    return replace(shown, outcome=Outcome.REGRESSION, detail=detail)


def _absence(side: str, result: WorkloadResult, row: StepMetric, absent: list[int], steps: int) -> str:
    remedy = row.remedy
    if result.total_iterations < steps:
        remedy = f"config steps={steps}; it measured {result.total_iterations}"
    held = f"{steps - len(absent)} of steps 1 to {steps}"
    return f"the {side} has it of {held}, and not of step {absent[0]}; it takes {remedy}"


def _is_same(one: str | float, other: str | float) -> bool:
    # By bits: 0.0 == -0.0.
    return one.hex() == other.hex() if isinstance(one, float) and isinstance(other, float) else one == other
