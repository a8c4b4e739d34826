"""Location of the first difference between two results: the step, the parameter and the module.

The functions are pure, except that they launch by a function of the caller and read the files of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.text import brief
from pytest_aorta.result.measurements import TensorHashes, WorkloadResult
from pytest_aorta.result.trace.operators import OperatorCall, read_operators
from pytest_aorta.verdict.bitwise.operators import locate_operator
from pytest_aorta.verdict.bitwise.steps import Difference, first_difference
from pytest_aorta.verdict.verdicts import Verdict

# Launches one side again with these config keys changed.
Again: TypeAlias = Callable[[WorkloadResult, Mapping[str, Any]], WorkloadResult]
# Returns the run folder of a result; None if it is not known.
FolderOf: TypeAlias = Callable[[WorkloadResult], Path | None]
# The config keys that make a workload hash single tensors.
HASH_TENSORS, HASH_TENSORS_STEP = "hash_tensors", "hash_tensors_step"
# The config key that makes a workload capture every operator of a step.
HASH_OPERATORS_STEP = "hash_operators_step"
# In the order in which a step computes them.
TENSOR_KINDS = ("forward", "backward", "gradients", "optimizer", "weights")
_LOGICAL = {"gradients": "gradients", "optimizer": "tensors of the optimizer's state", "weights": "parameters"}


def difference_text(
    failing: Sequence[Verdict], candidate: WorkloadResult, reference: WorkloadResult, located: Sequence[str]
) -> str:
    """Return the text of a failed comparison step by step: failing verdicts, differences in config, and location."""
    names = dict.fromkeys([candidate.workload, reference.workload])
    lines = [f"{' against '.join(names)} on {candidate.platform}, step by step:"]
    lines += [f"  {verdict}" for verdict in failing]
    if keys := other_keys(candidate, reference):
        lines.append(f"  config: {keys}")
    return "\n".join([*lines, *(f"  {line}" for line in located)])


def locate_first(
    candidate: WorkloadResult,
    reference: WorkloadResult,
    difference: Difference,
    config_keys: Collection[str],
    again: Again | None,
    folder_of: FolderOf,
) -> list[str]:
    """Return lines on the location of the difference.

    The location comes from the results, or from one more launch of each side by ``again``; None allows no launch.
    ``config_keys`` are the config keys that both sides have, and ``folder_of`` returns the run folder of a result.
    """
    step = difference.step
    lines = [f"first difference: step {step}, {difference.metric}"]
    can_hash = {HASH_TENSORS, HASH_TENSORS_STEP} <= set(config_keys)
    can_capture = HASH_OPERATORS_STEP in config_keys
    is_hashed = has_hashes(candidate, step) and has_hashes(reference, step)
    if again is None or not can_hash or (is_hashed and not can_capture):
        found = locate(candidate, reference, step, folder_of)
        if not found and can_hash:
            found = [
                f"next: --aorta-locate launches both once more to find the parameter and the module in step {step}"
            ]
        return lines + found
    changes: dict[str, Any] = {HASH_TENSORS: list(TENSOR_KINDS), HASH_TENSORS_STEP: step}
    if can_capture:
        changes[HASH_OPERATORS_STEP] = step
    try:
        there, here = again(reference, changes), again(candidate, changes)
    except LaunchError as error:
        return [
            *lines,
            *locate(candidate, reference, step, folder_of),
            f"not located further, because a launch failed: {error}",
        ]
    repeated = first_difference(here, there, step, [difference.metric])
    if repeated != difference:
        now = f"in step {repeated.step}" if repeated else f"in no step up to {step}"
        lines.append(f"launched once more, they first differ {now}: results vary between launches of the same code")
    return lines + locate(here, there, step, folder_of)


def has_hashes(result: WorkloadResult, step: int) -> bool:
    """Return True if all kinds of tensors were hashed in the step."""
    held = [*result.tensor_hashes.items(), *(result.boundary_hashes[0].items() if result.boundary_hashes else ())]
    return {kind for kind, hashes in held if str(step) in hashes.steps} == set(TENSOR_KINDS)


def locate(candidate: WorkloadResult, reference: WorkloadResult, step: int, folder_of: FolderOf) -> list[str]:
    """Return a line for each kind of tensor that both sides hashed in the step, in the order of computation."""
    lines: list[str] = []
    for kind in TENSOR_KINDS:
        if kind in _LOGICAL:
            line = _locate_tensor(kind, candidate.tensor_hashes, reference.tensor_hashes, step)
        else:
            line = _locate_module(kind, candidate.boundary_hashes, reference.boundary_hashes, step)
        if line is not None:
            lines.append(f"step {step}, {kind}: {line}")
    if len(lines) == len(TENSOR_KINDS) and all(" are the same" in line for line in lines[:-1]):
        lines.append("so the weights were changed in the optimizer's step, or after it")
    here, there = (_operators(folder_of(side), side.world_size, step) for side in (candidate, reference))
    if (line := locate_operator(here, there)) is not None:
        lines.append(f"step {step}, operators: {line}")
    return lines


def _operators(run_dir: Path | None, num_ranks: int, step: int) -> dict[int, list[OperatorCall]]:
    """Return the operators of each rank that captured the step."""
    if run_dir is None:
        return {}
    calls = {rank: read_operators(run_dir, rank, step) for rank in range(num_ranks)}
    return {rank: found for rank, found in calls.items() if found is not None}


def other_keys(candidate: WorkloadResult, reference: WorkloadResult) -> str:
    """Return the config keys with different values as text; empty if there are none."""
    here, there = candidate.config, reference.config
    return ", ".join(
        f"{key} is {brief(repr(here[key]), 120)}, the reference's {brief(repr(there[key]), 120)}"
        for key in here
        if here[key] != there.get(key, here[key])
    )


@dataclass(frozen=True)
class _Compared:
    """The tensors that both sides hashed in a step.

    Attributes:
        names: Names in the reference's order.
        different: Names with different hashes.
        shapes: Shape of each tensor, by name.
        alone: Names that only one side hashed.
    """

    names: list[str]
    different: list[str]
    shapes: dict[str, list[int]]
    alone: list[str]


def _compared(here: TensorHashes | None, there: TensorHashes | None, step: int) -> _Compared | None:
    if here is None or there is None or str(step) not in here.steps or str(step) not in there.steps:
        return None
    mine, other = _by_name(here, step), _by_name(there, step)
    names = [name for name in there.names if name in mine]
    different = [name for name in names if mine[name] != other[name]]
    shapes = dict(zip(there.names, there.shapes, strict=True))
    return _Compared(names, different, shapes, sorted(mine.keys() ^ other.keys()))


def _by_name(hashes: TensorHashes, step: int) -> dict[str, Any]:
    rows = zip(hashes.names, hashes.shapes, hashes.steps[str(step)], strict=True)
    return {name: (shape, value) for name, shape, value in rows}


def _locate_tensor(
    kind: str, here: Mapping[str, TensorHashes], there: Mapping[str, TensorHashes], step: int
) -> str | None:
    found = _compared(here.get(kind), there.get(kind), step)
    if found is None:
        return None
    alone = f"; one of the two alone has {found.alone[:3]}" if found.alone else ""
    if not found.different:
        return f"all {len(found.names)} {_LOGICAL[kind]} are the same{alone}"
    first = f"{found.different[0]} {found.shapes[found.different[0]]}"
    return f"{len(found.different)} of {len(found.names)} {_LOGICAL[kind]} differ, first {first}{alone}"


def _locate_module(
    kind: str, here: list[dict[str, TensorHashes]], there: list[dict[str, TensorHashes]], step: int
) -> str | None:
    pairs = zip(here, there, strict=False)
    ranks = [found for mine, other in pairs if (found := _compared(mine.get(kind), other.get(kind), step))]
    if not ranks:
        return None
    what = "inputs and outputs of modules" if kind == "forward" else "gradients of modules' outputs"
    if not (different := [rank for rank, found in enumerate(ranks) if found.different]):
        return f"all {len(ranks[0].names)} {what} are the same on all {len(ranks)} ranks"
    # Collectives propagate a difference to all ranks. The rank where it began has the earliest difference.
    rank = min(different, key=lambda rank: ranks[rank].names.index(ranks[rank].different[0]))
    found = ranks[rank]
    position = found.names.index(found.different[0])
    first = found.different[0]
    explained = (_in_forward if kind == "forward" else _in_backward)(first, found.names[:position])
    return (
        f"{len(found.different)} of {len(found.names)} {what} differ on rank {rank}, first {_boundary(kind, first)} "
        f"{found.shapes[first]}: {explained} (some differ on {len(different)} of {len(ranks)} ranks)"
    )


def _boundary(kind: str, name: str) -> str:
    module, _, part = name.partition(":")
    shown = f"the {part} of {module or 'the model'}"
    return shown if kind == "forward" else f"the gradient of {shown}"


def _in_forward(name: str, before: list[str]) -> str:
    module, _, part = name.partition(":")
    if part.startswith("output"):
        return f"what {module or 'the model'} was given is the same, so that it is computed there"
    if not before:
        return "the model is given other data"
    parent = module.rpartition(".")[0] or "the model"
    return f"computed outside of modules, in what {parent} does after {_boundary('forward', before[-1])}"


def _in_backward(name: str, before: list[str]) -> str:
    del name
    if not before:
        return "it comes from the loss"
    return f"made by backward between it and {_boundary('backward', before[-1])}, which is the same"
