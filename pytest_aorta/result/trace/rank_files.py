"""Files that each rank leaves beside its result: arrivals at collectives and captured operators."""

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.model import Count, Model, Positive, TensorHash, read_rank_file
from pytest_aorta.result.folder import OPERATORS_FILE, rank_folder

MAX_ARRIVALS_BYTES = 16 << 20


def flight_records(kind: str) -> list[dict[str, Any]] | None:
    """Return the entries of torch's recorder of ``nccl``, or of other backends, ``fr``; None if torch has none."""
    found = getattr(sys.modules.get("torch._C._distributed_c10d"), f"_dump_{kind}_trace_json", None)
    return None if found is None else json.loads(found(includeCollectives=True, onlyActive=False)).get("entries", [])


class Arrivals(Model, frozen=True):
    """The steps and arrivals of one rank, in nanoseconds on the host's clock.

    Attributes:
        began_ns: when the rank entered each step.
        ended_ns: when the rank left each step.
        known_from_ns: the moment from which on every arrival is recorded.
        arrived_ns: when the rank arrived at each collective, by a name that is the same on every rank.
    """

    began_ns: list[int]
    ended_ns: list[int]
    known_from_ns: int
    arrived_ns: dict[str, int]


def read_arrivals(path: Path) -> Arrivals | None:
    """Read the file that a rank leaves; return None if the rank left no file.

    Raises:
        ResultError: The file is unreadable or torn.
    """
    return read_rank_file(path, Arrivals, max_bytes=MAX_ARRIVALS_BYTES)


def waits_of_ranks_ms(ranks: Sequence[Arrivals]) -> list[list[float]]:
    """Return ``collective_ms[rank][step]`` of the last steps that every rank has recorded completely.

    A step's wait is the time in which the rank has arrived at some collective of the step and another rank has not.
    Collectives between steps are part of no step.
    The lists are empty without recorded collectives, for one rank, and for ranks with unequal numbers of steps.
    """
    counts = {len(rank.began_ns) for rank in ranks}
    if len(ranks) < 2 or len(counts) > 1 or not all(rank.arrived_ns for rank in ranks):
        return [[] for _ in ranks]
    known_from_ns = max(rank.known_from_ns for rank in ranks)
    last_ns: dict[str, int] = {}
    for rank in ranks:
        for name, arrived_ns in rank.arrived_ns.items():
            last_ns[name] = max(arrived_ns, last_ns.get(name, 0))
    first = max(bisect_left(rank.began_ns, known_from_ns) for rank in ranks)
    return [_waits_ms(rank, last_ns)[first:] for rank in ranks]


def _waits_ms(rank: Arrivals, last_ns: dict[str, int]) -> list[float]:
    waits_ns = [0] * len(rank.began_ns)
    covered_ns = 0
    for arrived_ns, name in sorted((moment, name) for name, moment in rank.arrived_ns.items()):
        step = bisect_right(rank.began_ns, arrived_ns) - 1
        if step < 0 or arrived_ns > rank.ended_ns[step]:
            continue
        # A rank may wait for several collectives at once, but each moment counts once.
        end_ns = min(last_ns[name], rank.ended_ns[step])
        waits_ns[step] += max(0, end_ns - max(arrived_ns, covered_ns))
        covered_ns = max(covered_ns, end_ns)
    return [wait_ns / 1e6 for wait_ns in waits_ns]


# The limits of one rank. A step of an 8B model runs some 20,000 operators, and in a pipeline several times as many.
MAX_CALLS = 200_000
MAX_OPERATORS_BYTES = 256 << 20
# Operators that write a part of a new buffer and leave the rest as it was in memory; their outputs are not hashed.
WITHOUT_DEFINED_OUTPUT = ("bucketing._pre_bucket_all_gather.default",)
# Begins the argument for the state of the generator from which an operator drew random numbers.
RANDOM_STATE = "random state"


class OperatorCall(Model, frozen=True):
    """One call of an operator.

    Attributes:
        name: the operator's name, e.g. ``aten.mm.default``.
        phase: ``forward``, ``recomputation`` (of forward, within backward), ``backward``,
            ``optimizer`` or ``after the optimizer``.
        module: path of the innermost module whose forward made the call; for an operator of backward, the module whose
            forward the operator differentiates; empty if unknown.
        source: ``file:line`` of the user's code that made the call, or for an operator of backward, the forward call;
            empty if unknown.
        is_collective: whether the operator communicates.
        arguments: text of the arguments that are not tensors.
        inputs, outputs: one hash per tensor; tensors that an operator writes in place are in both.
        parameters: ``(index among outputs, name)`` of each output that is a parameter.
        group: ranks of a collective, after the name of its operation if that is known; empty for other operators.
        sources: name of each input that is a parameter, dtype and shape of each other input.
        read, wrote: 2 if an input or output has a NaN, else 1 if one has an infinity, else 0.
    """

    name: str
    phase: str
    module: str
    source: str
    is_collective: bool
    arguments: str
    inputs: tuple[TensorHash, ...]
    outputs: tuple[TensorHash, ...]
    parameters: tuple[tuple[Count, str], ...] = ()
    group: str = ""
    sources: tuple[str, ...] = ()
    read: Count = 0
    wrote: Count = 0


class StepOperators(Model, frozen=True):
    """The operators of one step, in order."""

    step: Positive
    calls: list[OperatorCall]


def read_operators(run_dir: Path, rank: int, step: int) -> list[OperatorCall] | None:
    """Return the calls of a rank in ``step``, or None if the rank left none for that step.

    Raises:
        ResultError: The file is unreadable or has another shape.
    """
    path = rank_folder(run_dir, rank) / OPERATORS_FILE
    found = read_rank_file(path, StepOperators, max_bytes=MAX_OPERATORS_BYTES)
    return found.calls if found and found.step == step else None
