"""The operators that a rank ran in one step, in order, with hashes of their inputs and outputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.schema import violation
from pytest_aorta.result.folder import OPERATORS_FILE, rank_folder

# The limits of one rank. A step of an 8B model runs some 20,000 operators, and in a pipeline several times as many.
MAX_CALLS = 200_000
MAX_OPERATORS_BYTES = 256 << 20
SCHEMA = "rank_files.schema.json"


@dataclass(frozen=True)
class OperatorCall:
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

    name: str
    phase: str
    module: str
    source: str
    is_collective: bool
    arguments: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OperatorCall:
        """Build the call from an entry of a validated document."""
        named = tuple((int(position), name) for position, name in data["parameters"])
        return cls(**{**data, "inputs": tuple(data["inputs"]), "outputs": tuple(data["outputs"]), "parameters": named})


def operators_document(step: int, calls: list[OperatorCall]) -> dict[str, Any]:
    """Return the document that a rank leaves for one step."""
    return {"step": step, "calls": [asdict(call) for call in calls]}


def read_operators(run_dir: Path, rank: int, step: int) -> list[OperatorCall] | None:
    """Return the calls of a rank in ``step``, or None if the rank left none for that step.

    Raises:
        ResultError: The file is unreadable or has another shape.
    """
    path = rank_folder(run_dir, rank) / OPERATORS_FILE
    if not path.exists():
        return None
    try:
        document = read_json(path, max_bytes=MAX_OPERATORS_BYTES, follow_links=False)
    except UnreadableFile as error:
        raise ResultError(f"result invalid: {error}") from None
    if problem := violation(document, SCHEMA, "operators"):
        raise ResultError(f"result invalid: {path}: {problem}; run the workload again")
    if document["step"] != step:
        return None
    return [OperatorCall.from_json(call) for call in document["calls"]]
