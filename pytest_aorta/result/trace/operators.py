"""The operators that a rank ran in one step, in order, with hashes of their inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta

from pytest_aorta.common.model import Count, Model, Positive, TensorHash, read_rank_file
from pytest_aorta.result.folder import OPERATORS_FILE, rank_folder

# The limits of one rank. A step of an 8B model runs some 20,000 operators, and in a pipeline several times as many.
MAX_CALLS = 200_000
MAX_OPERATORS_BYTES = 256 << 20
Shown: TypeAlias = Annotated[str, Meta(max_length=1000)]


class OperatorCall(Model, frozen=True):
    """One call of an operator.

    Attributes:
        name: the operator's name, e.g. ``aten.mm.default``.
        phase: ``forward``, ``recomputation`` (of forward, within backward), ``backward`` or ``optimizer``.
        module: path of the innermost module whose forward made the call; for an operator of backward, the module whose
            forward the operator differentiates; empty if unknown.
        source: ``file:line`` of the user's code that made the call, or for an operator of backward, the forward call;
            empty if unknown.
        is_collective: whether the operator communicates.
        arguments: text of the arguments that are not tensors.
        inputs, outputs: one hash per tensor; tensors that an operator writes in place are in both.
        parameters: ``(index among outputs, name)`` of each output that is a parameter.
    """

    name: Annotated[str, Meta(max_length=200)]
    phase: str
    module: Shown
    source: Shown
    is_collective: bool
    arguments: Shown
    inputs: tuple[TensorHash, ...]
    outputs: tuple[TensorHash, ...]
    parameters: tuple[tuple[Count, Shown], ...] = ()


class StepOperators(Model, frozen=True):
    """The operators of one step, in order."""

    step: Positive
    calls: Annotated[list[OperatorCall], Meta(max_length=MAX_CALLS)]


def read_operators(run_dir: Path, rank: int, step: int) -> list[OperatorCall] | None:
    """Return the calls of a rank in ``step``, or None if the rank left none for that step.

    Raises:
        ResultError: The file is unreadable or has another shape.
    """
    path = rank_folder(run_dir, rank) / OPERATORS_FILE
    found = read_rank_file(path, StepOperators, max_bytes=MAX_OPERATORS_BYTES)
    return found.calls if found and found.step == step else None
