"""Location and likely cause of a recorded mismatch. Runs on the host after the loop."""

import math
from dataclasses import dataclass
from typing import Any

from pytest_aorta.worker import FailureDetail

from .oracle import DOUBLE, INPUT_SLOTS, ITERATION_STRIDE, LAYER_STRIDE, NEGATIVE, PRIME, RANK_STRIDE, sources_of_column
from .settings import Settings

H2D, ALL_GATHER, REDUCE_SCATTER = "h2d", "all_gather", "reduce_scatter"


@dataclass(frozen=True)
class Check:
    """A comparison of all data that one transfer brought; ``iteration`` counts checked iterations.

    The kind is ``h2d``, ``reduce_scatter``, or ``all_gather`` with the phase; ``layer`` is None for the input.
    """

    kind: str
    iteration: int
    layer: int | None = None


@dataclass(frozen=True)
class Mismatch:
    """One row of a comparison; the fields are :data:`~.oracle.COLUMNS`."""

    count: float
    first: float
    expected: float
    actual: float
    last: float
    last_expected: float
    last_actual: float
    difference: float

    @property
    def shift(self) -> int | None:
        """Return the shift of the codes, if the first and the last wrong element agree on one."""
        first = _shift(self.expected, self.actual)
        return first if first == _shift(self.last_expected, self.last_actual) else None

    @property
    def is_shifted_throughout(self) -> bool:
        """Return whether the sum over all wrong elements agrees with the shift; a code wraps after :data:`PRIME`."""
        if self.shift is None or not math.isfinite(self.difference):
            return False
        return int(self.difference - self.count * self.shift) % PRIME == 0

    def is_multiple(self, factor: int) -> bool:
        """Return whether the first and the last wrong element are ``factor`` times the expected values."""
        return (self.actual, self.last_actual) == (factor * self.expected, factor * self.last_expected)


def failure_detail(run: Settings, mismatch: Mismatch, check: Check, row: int) -> FailureDetail:
    """Locate and explain ``row`` of a check."""
    iteration, layer = run.warmup + check.iteration, check.layer
    index, no_data, source = int(mismatch.first), "zeroed: no data arrived", None
    if layer is None:
        total = run.h2d_tensor_size
        cause = explain(mismatch, total, input_hypotheses(iteration % INPUT_SLOTS), no_data)
    elif check.kind == REDUCE_SCATTER:
        index, total = index * run.world_size + row, len(range(row, run.fsdp_shard_size, run.world_size))
        source, cause = _explain_sum(run, mismatch, total, iteration, layer, row)
    else:
        total, source = run.fsdp_shard_size, row
        cause = explain(mismatch, total, shard_hypotheses(run, layer, row), no_data)
    values: dict[str, Any] = {"index": index, "expected": mismatch.expected, "actual": mismatch.actual, "cause": cause}
    if not math.isfinite(mismatch.actual):
        # A result contains only finite numbers, so the cause reports this value as text.
        values = {"cause": f"first at index {index}: expected {mismatch.expected:g}, got {mismatch.actual}"}
    count = int(mismatch.count)
    where: dict[str, Any] = {"layer": layer, "source_rank": source, "rank": run.rank}
    return FailureDetail(kind=check.kind, iteration=check.iteration, total=total, count=count, **where, **values)


def explain(mismatch: Mismatch, total: int, hypotheses: dict[int, str], zeros: str) -> str:
    """Return the likely cause of the wrong elements: their origin, if all recorded values agree on one.

    One element never identifies an origin, since dozens of the 251 codes belong to some iteration, layer or rank.
    """
    partial = f"only part, {mismatch.count:.0f} of {total}: " if mismatch.count < total else ""
    if mismatch.actual == mismatch.last_actual == 0:  # no code is zero
        return partial + zeros
    if mismatch.count == 1:
        return partial + f"off by {mismatch.actual - mismatch.expected:+g}; one element does not identify an origin"
    if mismatch.shift in hypotheses and mismatch.is_shifted_throughout:
        return partial + hypotheses[mismatch.shift]
    if mismatch.count == 2 and (mismatch.actual, mismatch.last_actual) == (mismatch.last_expected, mismatch.expected):
        return partial + "permuted: the right values at wrong positions"
    if mismatch.difference == 0:
        return partial + "the sum is right, so the values may be at wrong positions"
    return partial + "unknown: no code that another iteration, layer or rank would have"


def shard_hypotheses(run: Settings, layer: int, rank: int) -> dict[int, str]:
    """Return the meaning of each shift of a code in data of ``layer`` and ``rank``; the simplest meaning wins."""
    meanings: dict[int, str] = {}
    for age in (1, 2):
        meanings.setdefault(-age * ITERATION_STRIDE % PRIME, _stale(age))
    meanings.setdefault(ITERATION_STRIDE, "too new: overwritten with the data of the next iteration")
    # Between ranks of different families of 251, the shift depends on the position and has no meaning.
    family = rank // PRIME * PRIME
    for other in range(family, min(family + PRIME, run.world_size)):
        shift = (other - rank) * RANK_STRIDE % PRIME
        meanings.setdefault(shift, f"the data of rank {other}")
    for age in (0, 1):
        for other in range(run.layers):
            shift = ((other - layer) * LAYER_STRIDE - age * ITERATION_STRIDE) % PRIME
            meanings.setdefault(shift, f"the data of layer {other}" + (f", {_stale(age)}" if age else ""))
    return meanings


def input_hypotheses(slot: int) -> dict[int, str]:
    """Return the meaning of each shift of a code in the input of ``slot``."""
    return {
        ((slot - age) % INPUT_SLOTS - slot) * ITERATION_STRIDE % PRIME: _stale(age) for age in range(1, INPUT_SLOTS)
    }


def _explain_sum(
    run: Settings, mismatch: Mismatch, total: int, iteration: int, layer: int, column: int
) -> tuple[int | None, str]:
    """Return the rank whose contribution alone arrived, if there is one, and the likely cause."""
    double, negative = sources_of_column(column, run.rank, run.fsdp_shard_size, iteration, run.world_size)
    if mismatch.is_multiple(DOUBLE):
        return double, _alone(double, negative, "MAX")
    if mismatch.is_multiple(NEGATIVE):
        return negative, _alone(negative, double, "MIN")
    zeros = f"zeroed: no data arrived, or the contribution of rank {negative} arrived twice"
    return None, explain(mismatch, total, shard_hypotheses(run, layer, run.rank), zeros)


def _alone(present: int, absent: int, operation: str) -> str:
    return (
        f"the value of rank {present}'s contribution alone: the contribution of rank {absent} is missing, or the "
        f"reduction is {operation} instead of a sum"
    )


def _shift(expected: float, actual: float) -> int | None:
    is_code = actual.is_integer() and 1 <= actual <= PRIME
    return int(actual - expected) % PRIME if is_code else None


def _stale(age: int) -> str:
    return f"stale: from {age} iteration{'s' if age > 1 else ''} before"
