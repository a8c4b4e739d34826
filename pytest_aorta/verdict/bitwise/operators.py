"""The first operator of a step at which two launches differ, from the operators that each rank ran. Pure functions.

Operators are matched by content: the name, the plain arguments and the hashes of the inputs. So the launches may run
their operators in different orders, and one launch may run operators that the other does not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pytest_aorta.common.text import counted
from pytest_aorta.result.trace.operators import MAX_CALLS, OperatorCall

Calls = Sequence[OperatorCall]


class Evidence(IntEnum):
    """The evidence that an operator differs, from strong to weak."""

    COMPUTED = 0
    """The same inputs gave another output."""
    CHANGED = 1
    """An input is not in the reference, and no earlier operator wrote it."""
    OTHER = 2
    """The reference does not run this operator on these inputs."""
    RECEIVED = 3
    """A collective gave another output for the same input of this rank; the cause may be another rank."""


@dataclass(frozen=True)
class FirstOperator:
    """The first operator that differs on one rank.

    Attributes:
        rank: the rank.
        call: the operator's call by the candidate.
        evidence: how the call differs.
        position: index of the tensor that differs: among the call's inputs for ``CHANGED``, else among its outputs.
    """

    rank: int
    call: OperatorCall
    evidence: Evidence
    position: int


def locate_operator(candidate: Mapping[int, Calls], reference: Mapping[int, Calls]) -> str | None:
    """Return a line on the first operator that differs, given each side's calls by rank; None without common ranks."""
    ranks = _common_ranks(candidate, reference)
    if not ranks:
        return None
    firsts = _firsts(ranks, candidate, reference)
    if not firsts and all(alone := _run_alone(candidate[ranks[0]], reference[ranks[0]])):
        return (
            f"none named, because no operator gave another output for the same inputs, and the variants run different "
            f"operators: the candidate alone {_several(alone[0])}, the reference alone {_several(alone[1])}"
        )
    if not firsts:
        count = sum(len(candidate[rank]) for rank in ranks)
        partly = f"; only the first {MAX_CALLS:,} of a rank are captured" if _is_cut(candidate, reference) else ""
        return f"all {count:,} outputs of operators are the same on all {counted(len(ranks), 'rank')}{partly}"
    first = _strongest(firsts)
    shared = f"some operators differ on {len(firsts)} of {counted(len(ranks), 'rank')}"
    return f"first {_named(first)}: {_explained(first)} ({shared})"


def first_of_ranks(candidate: Mapping[int, Calls], reference: Mapping[int, Calls]) -> FirstOperator | None:
    """Return the first differing operator of the rank with the strongest evidence; None without a difference."""
    firsts = _firsts(_common_ranks(candidate, reference), candidate, reference)
    return _strongest(firsts) if firsts else None


def _run_alone(candidate: Calls, reference: Calls) -> tuple[list[OperatorCall], list[OperatorCall]]:
    """Return the first call of each operator that only the candidate runs, and of each that only the reference runs."""
    ours, theirs = _first_calls(candidate), _first_calls(reference)
    return [ours[name] for name in ours if name not in theirs], [theirs[name] for name in theirs if name not in ours]


def _first_calls(calls: Calls) -> dict[str, OperatorCall]:
    """Return the first call of each operator, in order."""
    firsts: dict[str, OperatorCall] = {}
    for call in calls:
        firsts.setdefault(call.name, call)
    return firsts


def _several(calls: Calls) -> str:
    """Return the first of some calls with its place, and the number of the others."""
    others = f" and {counted(len(calls) - 1, 'other')}" if len(calls) > 1 else ""
    return _placed(calls[0]) + others


def _common_ranks(candidate: Mapping[int, Calls], reference: Mapping[int, Calls]) -> list[int]:
    return sorted(candidate.keys() & reference.keys())


def _firsts(
    ranks: Sequence[int], candidate: Mapping[int, Calls], reference: Mapping[int, Calls]
) -> list[FirstOperator]:
    return [found for rank in ranks if (found := first_operator(rank, candidate[rank], reference[rank]))]


def _strongest(firsts: Sequence[FirstOperator]) -> FirstOperator:
    return min(firsts, key=lambda found: (found.evidence, found.rank))


def first_operator(rank: int, candidate: Calls, reference: Calls) -> FirstOperator | None:
    """Return the first operator of a rank that differs from the reference's, or None.

    If each variant runs operators that the other lacks, each also has values that the other lacks. Then the only
    evidence is a different output for the same inputs.
    """
    is_one_program = not all(_run_alone(candidate, reference))
    outputs: dict[tuple[str, str, tuple[str, ...]], set[tuple[str, ...]]] = defaultdict(set)
    known: set[str] = set()
    for call in reference:
        outputs[_key(call)].add(call.outputs)
        known.update(call.inputs, call.outputs)
    for call in candidate:
        expected = outputs.get(_key(call))
        if expected is not None:
            if call.outputs not in expected and (is_one_program or not call.is_collective):
                evidence = Evidence.RECEIVED if call.is_collective else Evidence.COMPUTED
                return FirstOperator(rank, call, evidence, _first_difference(call.outputs, next(iter(expected))))
            continue
        if not is_one_program:
            continue
        position = next((number for number, value in enumerate(call.inputs) if value not in known), None)
        if position is not None:
            return FirstOperator(rank, call, Evidence.CHANGED, position)
        return FirstOperator(rank, call, Evidence.OTHER, 0)
    return None


def _key(call: OperatorCall) -> tuple[str, str, tuple[str, ...]]:
    return call.name, call.arguments, call.inputs


def _first_difference(here: Sequence[str], there: Sequence[str]) -> int:
    return next((number for number, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)


def _is_cut(*sides: Mapping[int, Calls]) -> bool:
    return any(len(calls) >= MAX_CALLS for side in sides for calls in side.values())


def _named(first: FirstOperator) -> str:
    return f"{_placed(first.call)} on rank {first.rank}"


def _placed(call: OperatorCall) -> str:
    place = f" of {call.module}" if call.module else ""
    source = f" ({call.source})" if call.source else ""
    return f"{call.name} in {call.phase}{place}{source}"


def _explained(first: FirstOperator) -> str:
    call, number = first.call, first.position
    if first.evidence is Evidence.COMPUTED:
        parameter = dict(call.parameters).get(number)
        output = parameter or ("output" if len(call.outputs) == 1 else f"output {number + 1} of {len(call.outputs)}")
        return f"the same inputs gave another {output}"
    if first.evidence is Evidence.CHANGED:
        return (
            f"its input {number + 1} of {len(call.inputs)} is not in the reference, and no captured operator "
            f"before wrote it"
        )
    if first.evidence is Evidence.OTHER:
        return "the reference does not run this operator on these inputs"
    return "every rank gave the same, and this rank received another output"
