"""Location and likely cause of a recorded mismatch. Runs on the host after the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_aorta.worker import FailureDetail

from .oracle import DOUBLE, INPUT_SLOTS, ITERATION_STRIDE, LAYER_STRIDE, NEGATIVE, PRIME, RANK_STRIDE, sources_of_column

# Slots of an iteration: the input, then each layer's forward and backward all-gather and its reduce-scatter.
INPUT = 0
PHASES = ("forward", "backward")
_CHECKS_PER_LAYER = len(PHASES) + 1


def slots(layers: int) -> int:
    """Return the number of checks of an iteration."""
    return 1 + _CHECKS_PER_LAYER * layers


def gather_slot(layer: int, phase: str) -> int:
    """Return the slot of a layer's all-gather in ``forward`` or ``backward``."""
    return 1 + _CHECKS_PER_LAYER * layer + PHASES.index(phase)


def reduce_slot(layer: int) -> int:
    """Return the slot of a layer's reduce-scatter."""
    return 1 + _CHECKS_PER_LAYER * layer + len(PHASES)


@dataclass(frozen=True)
class Place:
    """The dimensions of the checks: the world, this rank, and the checked iterations of the run."""

    rank: int
    world_size: int
    layers: int
    shard_size: int
    input_size: int
    first_iteration: int
    iterations: int


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

    @property
    def is_exchange(self) -> bool:
        """Return whether exactly two elements are wrong, and each has the value of the other."""
        return self.count == 2 and (self.actual, self.last_actual) == (self.last_expected, self.expected)

    def is_multiple(self, factor: int) -> bool:
        """Return whether the first and the last wrong element are ``factor`` times the expected values."""
        return (self.actual, self.last_actual) == (factor * self.expected, factor * self.last_expected)

    @property
    def is_zero(self) -> bool:
        """Return whether the first and the last wrong element are zero, which is not a code."""
        return self.actual == 0 and self.last_actual == 0


def failure_detail(place: Place, mismatch: Mismatch, checked: int, slot: int, row: int) -> FailureDetail:
    """Locate and explain ``row`` of ``slot`` in the ``checked``-th checked iteration."""
    if slot == INPUT:
        return _input_detail(place, mismatch, checked)
    layer, check = divmod(slot - 1, _CHECKS_PER_LAYER)
    if check == len(PHASES):
        return _reduced_detail(place, mismatch, checked, layer, row)
    cause = explain(mismatch, place.shard_size, shard_hypotheses(place, layer, row), "zeroed: no data arrived")
    detail = FailureDetail(
        kind=f"all_gather_{PHASES[check]}",
        iteration=checked,
        rank=place.rank,
        layer=layer,
        source_rank=row,
        total=place.shard_size,
        cause=cause,
    )
    return _with_values(detail, mismatch, int(mismatch.first))


def explain(mismatch: Mismatch, total: int, hypotheses: dict[int, str], zeros: str) -> str:
    """Return the likely cause of the wrong elements: their origin, if all recorded values agree on one.

    One element never identifies an origin, since dozens of the 251 codes belong to some iteration, layer or rank.
    """
    partial = f"only part, {mismatch.count:.0f} of {total}: " if mismatch.count < total else ""
    if mismatch.is_zero:
        return partial + zeros
    if mismatch.count == 1:
        return partial + f"off by {mismatch.actual - mismatch.expected:+g}; one element does not identify an origin"
    if mismatch.shift in hypotheses and mismatch.is_shifted_throughout:
        return partial + hypotheses[mismatch.shift]
    if mismatch.is_exchange:
        return partial + "permuted: the right values at wrong positions"
    if mismatch.difference == 0:
        return partial + "the sum is right, so the values may be at wrong positions"
    return partial + "unknown: no code that another iteration, layer or rank would have"


def shard_hypotheses(place: Place, layer: int, rank: int) -> dict[int, str]:
    """Return the meaning of each shift of a code in data of ``layer`` and ``rank``; the simplest meaning wins."""
    meanings: dict[int, str] = {}
    for age in (1, 2):
        meanings.setdefault(-age * ITERATION_STRIDE % PRIME, _stale(age))
    meanings.setdefault(ITERATION_STRIDE, "too new: overwritten with the data of the next iteration")
    # Between ranks of different families of 251, the shift depends on the position and has no meaning.
    family = rank // PRIME * PRIME
    for other in range(family, min(family + PRIME, place.world_size)):
        shift = (other - rank) * RANK_STRIDE % PRIME
        meanings.setdefault(shift, f"the data of rank {other}")
    for age in (0, 1):
        for other in range(place.layers):
            shift = ((other - layer) * LAYER_STRIDE - age * ITERATION_STRIDE) % PRIME
            meanings.setdefault(shift, f"the data of layer {other}" + (f", {_stale(age)}" if age else ""))
    return meanings


def input_hypotheses(slot: int) -> dict[int, str]:
    """Return the meaning of each shift of a code in the input of ``slot``."""
    return {
        ((slot - age) % INPUT_SLOTS - slot) * ITERATION_STRIDE % PRIME: _stale(age) for age in range(1, INPUT_SLOTS)
    }


def _input_detail(place: Place, mismatch: Mismatch, checked: int) -> FailureDetail:
    hypotheses = input_hypotheses((place.first_iteration + checked) % INPUT_SLOTS)
    cause = explain(mismatch, place.input_size, hypotheses, "zeroed: no data arrived")
    detail = FailureDetail(kind="h2d", iteration=checked, rank=place.rank, total=place.input_size, cause=cause)
    return _with_values(detail, mismatch, int(mismatch.first))


def _reduced_detail(place: Place, mismatch: Mismatch, checked: int, layer: int, column: int) -> FailureDetail:
    iteration = place.first_iteration + checked
    double, negative = sources_of_column(column, place.rank, place.shard_size, iteration, place.world_size)
    total = len(range(column, place.shard_size, place.world_size))
    source, cause = None, ""
    if mismatch.is_multiple(DOUBLE):
        source, cause = double, _alone(double, negative, "MAX")
    elif mismatch.is_multiple(NEGATIVE):
        source, cause = negative, _alone(negative, double, "MIN")
    else:
        zeros = f"zeroed: no data arrived, or the contribution of rank {negative} arrived twice"
        cause = explain(mismatch, total, shard_hypotheses(place, layer, place.rank), zeros)
    detail = FailureDetail(
        kind="reduce_scatter",
        iteration=checked,
        rank=place.rank,
        layer=layer,
        source_rank=source,
        total=total,
        cause=cause,
    )
    return _with_values(detail, mismatch, int(mismatch.first) * place.world_size + column)


def _alone(present: int, absent: int, operation: str) -> str:
    return (
        f"the value of rank {present}'s contribution alone: the contribution of rank {absent} is missing, or the "
        f"reduction is {operation} instead of a sum"
    )


def _with_values(detail: FailureDetail, mismatch: Mismatch, index: int) -> FailureDetail:
    count = int(mismatch.count)
    if math.isfinite(mismatch.actual):
        return detail.replace(count=count, index=index, expected=mismatch.expected, actual=mismatch.actual)
    # A result contains only finite numbers, so the cause reports this value as text.
    cause = f"first at index {index}: expected {mismatch.expected:g}, got {mismatch.actual}"
    return detail.replace(count=count, cause=cause)


def _shift(expected: float, actual: float) -> int | None:
    is_code = actual.is_integer() and 1 <= actual <= PRIME
    return int(actual - expected) % PRIME if is_code else None


def _stale(age: int) -> str:
    return f"stale: from {age} iteration{'s' if age > 1 else ''} before"
