"""Bitwise comparison of two results: step by step, and the first tensor, module and operator that differ.

The functions are pure, except that they launch by a function of the caller and read the files of operators. Operators
are matched by content: the name, the plain arguments and the hashes of the inputs. So the launches may run their
operators in different orders, and one launch may run operators that the other does not run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.text import counted
from pytest_aorta.result.measurements import TensorHashes, WorkloadResult
from pytest_aorta.result.series import AVERAGES, BUFFERS, STATE, Series, joined_hashes, joined_steps
from pytest_aorta.result.trace.rank_files import (
    MAX_CALLS,
    RANDOM_STATE,
    WITHOUT_DEFINED_OUTPUT,
    OperatorCall,
    read_operators,
)
from pytest_aorta.verdict.environment import changes
from pytest_aorta.verdict.metrics import METRICS, Origin, Tolerance, check_compared
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Reason,
    ReferenceKind,
    State,
    Verdict,
    VerdictReference,
)

# Step -> values of the step: one, or for a script those of each rank and optimizer.
Bits: TypeAlias = Mapping[int, tuple[str | float | None, ...]]
_EXACT, _REFERENCE = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)
Calls: TypeAlias = Sequence[OperatorCall]
# Launches one side again with these config keys changed.
Again: TypeAlias = Callable[[WorkloadResult, Mapping[str, Any]], WorkloadResult]
# Returns the run folder of a result; None if it is not known.
FolderOf: TypeAlias = Callable[[WorkloadResult], Path | None]
# The config keys that make a workload hash single tensors.
HASH_TENSORS, HASH_TENSORS_STEP = "hash_tensors", "hash_tensors_step"
# The config key that makes a workload capture every operator of a step.
HASH_OPERATORS_STEP = "hash_operators_step"
OPTIMIZER = "optimizer"
# Kind of tensors -> what they are, in the order in which a step computes them.
TENSOR_KINDS = {
    "gradients": "gradients",
    "clipped": "gradients after clipping",
    OPTIMIZER: "numbers and tensors of the optimizer",
    "weights": "parameters",
}


class _StepMetric(NamedTuple):
    """A value that a result contains for each step; ``remedy`` says how to record it for all steps."""

    bits: Callable[[WorkloadResult], Bits]
    remedy: str


def _of_series(result: WorkloadResult, values_of: Callable[[Series], Mapping[str, str | float]]) -> Bits:
    rows = [values_of(series) for rank in result.ranks for series in rank.series]
    steps = {int(step) for row in rows for step in row}
    return {step: tuple(row.get(str(step)) for row in rows) for step in steps}


def _recorded(name: str) -> Callable[[WorkloadResult], Bits]:
    """Return a function that reads the values that a result has of its steps, or those of a script's optimizers."""

    def bits(result: WorkloadResult) -> Bits:
        values = enumerate(getattr(result, name), 1)
        return {step: (value,) for step, value in values} or _of_series(result, attrgetter(name))

    return bits


def _hashes(kind: str) -> Callable[[WorkloadResult], Bits]:
    return lambda result: _of_all(joined_hashes([rank.series for rank in result.ranks], kind))


def _of_all(hashes: Mapping[str, str]) -> Bits:
    return {int(step): (value,) for step, value in hashes.items()}


# In the order in which a step computes them.
STEP_METRICS = {
    "loss": _StepMetric(_recorded("loss"), "recorder.loss(value) in each step"),
    "grad_norm": _StepMetric(_recorded("grad_norm"), "recorder.grad_norm(value) in each step"),
    "weight_hash": _StepMetric(
        lambda result: _of_all(result.weight_hashes),
        "config hash_every=1, or recorder.weight_hash(step, value) after each step",
    ),
}
_EVERY_STEP = "an optimizer that steps at most 1,000 times, as of these steps alone all hashes are known"
# What a restart of a script compares too.
RESTART_METRICS = {
    "settings": _StepMetric(lambda result: _of_series(result, lambda one: one.settings_by_step), _EVERY_STEP),
    **STEP_METRICS,
    "buffer_hash": _StepMetric(_hashes(BUFFERS), _EVERY_STEP),
    "optimizer_hash": _StepMetric(_hashes(STATE), _EVERY_STEP),
    "averages_hash": _StepMetric(_hashes(AVERAGES), _EVERY_STEP),
}


@dataclass(frozen=True)
class Difference:
    """The first difference: the step, counted from 1, and the metric that differs first in the step."""

    step: int
    metric: str


def from_first_step(steps: int) -> dict[str, Any]:
    """Return the config that makes a workload measure and hash its first ``steps`` steps."""
    return {"steps": steps, "warmup": 0, "hash_every": 1}


def joined(first: WorkloadResult, last: WorkloadResult) -> WorkloadResult:
    """Return the steps of two launches as one result; the steps of ``last`` follow those of ``first``."""
    before, done = first.ranks[0], first.total_iterations
    ranks = [
        after.replace(
            total_iterations=done + after.total_iterations,
            loss=[*before.loss, *after.loss],
            grad_norm=[*before.grad_norm, *after.grad_norm],
            weight_hashes=joined_steps(before.weight_hashes, after.weight_hashes, done),
            series=[],
        )
        for after in last.ranks
    ]
    if len(first.ranks) == len(last.ranks):
        pairs = [
            zip(one.series, other.series, strict=False) for one, other in zip(first.ranks, last.ranks, strict=True)
        ]
        series = [[one.followed_by(other) for one, other in pair] for pair in pairs]
        ranks = [rank.replace(series=own) for rank, own in zip(ranks, series, strict=True)]
    return last.replace(ranks=ranks)


def split(metrics: Collection[str] | None) -> tuple[list[str], list[str]]:
    """Split the metrics to compare into metrics of steps and of whole launches; None selects all metrics of steps.

    Raises:
        SpecError: ``metrics`` is empty, or a metric is unknown.
    """
    if metrics is None:
        return list(STEP_METRICS), []
    check_compared(metrics, STEP_METRICS | METRICS)
    by_step = [name for name in STEP_METRICS if name in metrics]
    return by_step, [name for name in METRICS if name in metrics and name not in by_step]


def compare_steps(
    case: str, candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> tuple[Verdict, ...]:
    """Return one verdict per metric on the bits of the first ``steps`` measured steps.

    The verdict is *missing* if a side lacks some of these steps, and *not applicable* if both the values and the
    machines, or the versions installed there, differ.
    """
    return tuple(_compare(case, name, candidate, reference, steps) for name in metrics)


def num_steps(result: WorkloadResult) -> int:
    """Return the number of steps; of a script, with those that were not timed."""
    return max((one.num_steps for rank in result.ranks for one in rank.series), default=result.total_iterations)


def compare_lengths(case: str, candidate: WorkloadResult, reference: WorkloadResult) -> tuple[Verdict, ...]:
    """Return a verdict if the sides have different numbers of steps."""
    here, there = float(num_steps(candidate)), float(num_steps(reference))
    row = Verdict(case, "num_steps", Decided(Outcome.REGRESSION), here, there, None, _EXACT, _REFERENCE)
    return (row,) if here != there else ()


def first_difference(
    candidate: WorkloadResult, reference: WorkloadResult, steps: int, metrics: Collection[str]
) -> Difference | None:
    """Return the earliest step that differs, with the differing metric that it computes first, or None."""
    for step in range(1, steps + 1):
        for name in (name for name in RESTART_METRICS if name in metrics):
            here, there = map(RESTART_METRICS[name].bits, (candidate, reference))
            if step in here and step in there and not _is_same(here[step], there[step]):
                return Difference(step, name)
    return None


def _compare(case: str, metric: str, candidate: WorkloadResult, reference: WorkloadResult, steps: int) -> Verdict:
    here, there = map(RESTART_METRICS[metric].bits, (candidate, reference))

    def verdict(state: State, detail: str, shown: int | None = None) -> Verdict:
        """Return a verdict that shows the values of step ``shown``."""
        pairs = [] if shown is None else [*zip(here[shown], there[shown], strict=False)]
        different = (pair for pair in pairs if not _is_same(*pair))
        value, other = next(different, pairs[0] if pairs else (None, None))
        return Verdict(case, metric, state, value, other, None, _EXACT, _REFERENCE, detail)

    for side, result, held in (("candidate", candidate, here), ("reference", reference, there)):
        if absent := [step for step in range(1, steps + 1) if step not in held]:
            detail = _absence(side, result, RESTART_METRICS[metric].remedy, absent, steps)
            return verdict(Missing(MissingPart.CANDIDATE_VALUE), detail)
    if not (different := [step for step in range(1, steps + 1) if not _is_same(here[step], there[step])]):
        return verdict(Decided(Outcome.PASS), f"all {steps} steps" if steps > 1 else "the step", steps)
    other = changes(candidate.facts, reference.facts)
    if other.machine:
        return verdict(NotApplicable(Reason.ENVIRONMENT), other.machine, different[0])
    details = [f"first in step {different[0]}, in {len(different)} of {steps} steps", other.settings]
    if not all(result.environment.get("bitwise_reproducible", True) for result in (candidate, reference)):
        details.append(
            "not bitwise reproducible here, so the difference may be chance: run both in their deterministic mode"
        )
    return verdict(Decided(Outcome.REGRESSION), "; ".join(filter(None, details)), different[0])


def _absence(side: str, result: WorkloadResult, remedy: str, absent: list[int], steps: int) -> str:
    if result.total_iterations < steps:
        remedy = f"config steps={steps}; it measured {result.total_iterations}"
    held = f"{steps - len(absent)} of steps 1 to {steps}"
    return f"the {side} has values for {held}, but not for step {absent[0]}; use {remedy}"


def _is_same(one: object, other: object) -> bool:
    # Compare bits, because 0.0 == -0.0.
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    return one.hex() == other.hex() if isinstance(one, float) and isinstance(other, float) else one == other


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
    is_hashed = all(
        {kind for kind, hashes in result.tensor_hashes.items() if str(step) in hashes.steps} == {*TENSOR_KINDS}
        for result in (candidate, reference)
    )
    if again is None or not (can_hash or can_capture) or (is_hashed and not can_capture):
        found = locate(candidate, reference, step, folder_of)
        if not found and again is not None:
            found = [f"not located further: a side has no config keys {HASH_OPERATORS_STEP} and {HASH_TENSORS}"]
        return lines + found
    at: int | None = step
    while at is not None:
        changes: dict[str, Any] = {HASH_TENSORS: list(TENSOR_KINDS), HASH_TENSORS_STEP: at} if can_hash else {}
        if can_capture:
            changes[HASH_OPERATORS_STEP] = at
        try:
            there, here = again(reference, changes), again(candidate, changes)
        except LaunchError as error:
            lines += locate(candidate, reference, step, folder_of)
            return [*lines, f"not located further, because a launch failed: {error}"]
        repeated = first_difference(here, there, max(step, here.total_iterations), [difference.metric])
        if repeated != difference:
            is_captured = can_capture and at == step
            lines.append(f"launched once more, they {_now(repeated, step, is_captured=is_captured)}")
        found = locate(here, there, at, folder_of)
        # The operators of an earlier step whose tensors differ are captured by launches of their own.
        if (at := _first_earlier(here, there, at)) is not None:
            lines.append(f"tensors differ in step {at} already")
    return lines + found


def _now(repeated: Difference | None, step: int, *, is_captured: bool) -> str:
    """Return where launches that first differed in ``step`` differ now, and why; the capture may be of that step."""
    vary = "results vary between launches of the same code"
    if repeated is not None and repeated.step < step:
        return f"first differ in step {repeated.step}: {vary}"
    if not is_captured:
        return f"differ in no step up to {step}: {vary}"
    why = "because it waits at each collective and zeroes new memory"
    if repeated is None:
        return f"differ in no step up to {step}: the capture may hide a race, {why}; else {vary}"
    return (
        f"differ first in step {repeated.step}, not in the captured step {step}: the likely cause is a race, which the "
        f"capture hides, {why}"
    )


def locate(candidate: WorkloadResult, reference: WorkloadResult, step: int, folder_of: FolderOf) -> list[str]:
    """Return a line for each kind of tensor that both sides hashed in the step, in the order of computation."""
    kinds = _compared(candidate, reference, step)
    lines = [kind.text for kind in kinds]
    if (earlier := _first_earlier(candidate, reference, step)) is not None:
        begun = [kind.text for kind in _compared(candidate, reference, earlier) if kind.differs]
        lines = [*begun, f"so tensors differed in step {earlier}, before the values of step {step} did", *lines]
    elif len(kinds) == len(TENSOR_KINDS) and not any(kind.differs for kind in kinds[:-1]):
        lines.append("so the weights were changed in the optimizer's step, or after it")
    for captured in (earlier or step, step):
        sides = (read_all_operators(folder_of(side), side.world_size, captured) for side in (candidate, reference))
        if (line := locate_operator(*sides)) is not None:
            lines.append(f"step {captured}, operators: {line}")
            break
    return lines


class _Compared(NamedTuple):
    """The comparison of a kind of tensors that both sides hashed in a step, and a line on those that differ."""

    differs: bool
    text: str


def _compared(candidate: WorkloadResult, reference: WorkloadResult, step: int) -> list[_Compared]:
    found = []
    for kind, what in TENSOR_KINDS.items():
        sides = [side.tensor_hashes.get(kind, _NOT_HASHED) for side in (candidate, reference)]
        if not all(str(step) in side.steps for side in sides):
            continue
        here, there = (
            {name: (shape, value) for name, shape, value in zip(of.names, of.shapes, of.steps[str(step)], strict=True)}
            for of in sides
        )
        names = [name for name in there if name in here]
        different = [name for name in names if here[name] != there[name]]
        text = f"all {len(names)} {what} are the same"
        if different:
            shape, _ = there[different[0]]
            text = f"{len(different)} of {len(names)} {what} differ, first {different[0]} {shape}"
        alone = sorted(here.keys() ^ there.keys())[:3]
        more = f"; one of the two alone has {alone}" if alone else ""
        found.append(_Compared(bool(different), f"step {step}, {kind}: {text}{more}"))
    return found


_NOT_HASHED = TensorHashes([], [], {})


def _first_earlier(candidate: WorkloadResult, reference: WorkloadResult, step: int) -> int | None:
    """Return the first step before ``step`` in which a tensor differs that both sides hashed, or None."""
    steps = range(1, step)
    return next((one for one in steps if any(kind.differs for kind in _compared(candidate, reference, one))), None)


def read_all_operators(run_dir: Path | None, num_ranks: int, step: int) -> dict[int, list[OperatorCall]]:
    """Return the operators of each rank that captured the step."""
    if run_dir is None:
        return {}
    calls = {rank: read_operators(run_dir, rank, step) for rank in range(num_ranks)}
    return {rank: found for rank, found in calls.items() if found is not None}


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
        twin: the reference's call of the operator with the same inputs; None if it has none.
    """

    rank: int
    call: OperatorCall
    evidence: Evidence
    position: int
    twin: OperatorCall | None = None

    @property
    def explanation(self) -> str:
        """Return how the call differs, as text."""
        call, number = self.call, self.position
        if self.twin is not None and (call.group, call.arguments) != (self.twin.group, self.twin.arguments):
            here, there = (one.group or one.arguments for one in (call, self.twin))
            return f"on the same inputs, it runs with {here}, the reference's with {there}"
        if self.evidence is Evidence.COMPUTED:
            output = "output" if len(call.outputs) == 1 else f"output {number + 1} of {len(call.outputs)}"
            return f"the same inputs gave another {dict(call.parameters).get(number, output)}"
        if self.evidence is Evidence.CHANGED:
            source = call.sources[number] if call.sources else ""
            shown = f", {source}," if source else ""
            why = "; kernels that inductor generated are not captured"
            if source.startswith(("torch.int", "torch.uint")):
                why = ": this rank was given another batch, or a kernel that inductor generated wrote these integers"
            return (
                f"its input {number + 1} of {len(call.inputs)}{shown} is not in the reference, and no captured "
                f"operator before wrote it{why}"
            )
        if self.evidence is Evidence.OTHER:
            state = " in this state of its random generator" if RANDOM_STATE in call.arguments else ""
            return f"the reference does not run this operator on these inputs{state}"
        return "every rank gave the same, and this rank received another output"


def locate_operator(candidate: Mapping[int, Calls], reference: Mapping[int, Calls]) -> str | None:
    """Return a line on the first operator that differs, given each side's calls by rank; None without common ranks."""
    ranks = sorted(candidate.keys() & reference.keys())
    if not ranks:
        return None
    if firsts := first_operators(candidate, reference):
        shared = f"some operators differ on {len(firsts)} of {counted(len(ranks), 'rank')}"
        return f"first {_placed(firsts[0].call)} on rank {firsts[0].rank}: {firsts[0].explanation} ({shared})"
    sides = candidate[ranks[0]], reference[ranks[0]]
    if not _is_one_program(*sides):
        here, there = _run_alone(*sides), _run_alone(*reversed(sides))
        return (
            f"none named, because no operator gave another output for the same inputs, and the variants run different "
            f"operators: the candidate alone {here}, the reference alone {there}"
        )
    count = sum(len(candidate[rank]) for rank in ranks)
    is_cut = any(len(calls) >= MAX_CALLS for side in (candidate, reference) for calls in side.values())
    partly = f"; only the first {MAX_CALLS:,} of a rank are captured" if is_cut else ""
    every = {call.name for side in (candidate, reference) for rank in ranks for call in side[rank]}
    if undefined := sorted(every.intersection(WITHOUT_DEFINED_OUTPUT)):
        partly += f"; left out, because they write only a part of their output: {', '.join(undefined)}"
    return (
        f"all {count:,} outputs of operators are the same on all {counted(len(ranks), 'rank')}{partly}; the capture "
        f"zeroes new memory and waits at each collective, which can hide a race"
    )


def first_operators(candidate: Mapping[int, Calls], reference: Mapping[int, Calls]) -> list[FirstOperator]:
    """Return the first differing operator of each rank that both sides captured, the strongest evidence first."""
    ranks = candidate.keys() & reference.keys()
    firsts = [found for rank in ranks if (found := first_operator(rank, candidate[rank], reference[rank]))]
    return sorted(firsts, key=lambda found: (found.evidence, found.rank))


def _is_one_program(candidate: Calls, reference: Calls) -> bool:
    """Return False if each side runs an operator that the other one does not run."""
    here, there = ({call.name for call in side} for side in (candidate, reference))
    return here <= there or there <= here


def _run_alone(calls: Calls, others: Calls) -> str:
    """Return the first call of an operator that the ``others`` do not run, and the number of further operators."""
    known = {call.name for call in others}
    alone = [call for call in calls if call.name not in known]
    further = len({call.name for call in alone}) - 1
    return _placed(alone[0]) + (f" and {counted(further, 'other')}" if further else "")


def first_operator(rank: int, candidate: Calls, reference: Calls) -> FirstOperator | None:
    """Return the first operator of a rank that differs from the reference's, or None.

    If each variant runs operators that the other lacks, each also has values that the other lacks. Then the only
    evidence is a different output for the same inputs.
    """
    is_one_program = _is_one_program(candidate, reference)
    outputs: dict[tuple[str, str, tuple[str, ...]], set[tuple[str, ...]]] = defaultdict(set)
    known: set[str] = set()
    twins: dict[tuple[str, tuple[str, ...]], OperatorCall] = {}
    for call in reference:
        outputs[_key(call)].add(call.outputs)
        known.update(call.inputs, call.outputs)
        twins.setdefault((call.name, call.inputs), call)
    for call in candidate:
        twin = twins.get((call.name, call.inputs)) if call.inputs else None
        expected = outputs.get(_key(call))
        if expected is not None:
            if call.outputs not in expected and (is_one_program or not call.is_collective):
                evidence = Evidence.RECEIVED if call.is_collective else Evidence.COMPUTED
                pairs = zip(call.outputs, next(iter(expected)), strict=False)
                position = next((number for number, (here, there) in enumerate(pairs) if here != there), 0)
                return FirstOperator(rank, call, evidence, position, twin)
            continue
        if not is_one_program:
            continue
        changed = [number for number, value in enumerate(call.inputs) if value not in known]
        return FirstOperator(rank, call, *((Evidence.CHANGED, changed[0]) if changed else (Evidence.OTHER, 0)), twin)
    return None


def _key(call: OperatorCall) -> tuple[str, str, tuple[str, ...]]:
    return call.name, call.arguments, call.inputs


def _placed(call: OperatorCall) -> str:
    place = f" of {call.module}" if call.module else ""
    source = f" ({call.source})" if call.source else ""
    group = f" over {call.group}" if call.group else ""
    phase = call.phase if call.phase.startswith("after") else f"in {call.phase}"
    return f"{call.name}{group} {phase}{place}{source}"


def locate_non_finite(calls: Mapping[int, Calls]) -> tuple[str, bool]:
    """Return a line on the operator, given calls by rank, that wrote the first NaN, or infinity that became one.

    The second value is True if the operator read no such value, so that an earlier step needs no search.
    """
    origins = [(position, rank) for rank, own in calls.items() if (position := _first_non_finite(own)) is not None]
    readers = [(place, rank) for rank, own in calls.items() for place, call in enumerate(own) if call.read == _NAN]
    if not (origins or readers):
        return "no captured operator wrote a NaN", False
    position, rank = min(origins or readers)
    call = calls[rank][position]
    if not origins:
        return f"first NaN: {_placed(call)} on rank {rank} read one that no operator wrote", False
    what = "NaN" if call.wrote == _NAN else "infinity"
    names = "".join(f" in {name}" for _, name in call.parameters[:1])
    return f"first {what}{names}: {_placed(call)} on rank {rank}, from finite inputs", True


_NAN = 2


def _first_non_finite(calls: Calls) -> int | None:
    """Return the position of the call that made a rank's first NaN, or the infinity from which that NaN was made."""
    own = (number for number, call in enumerate(calls) if call.wrote == _NAN > call.read and not call.is_collective)
    position = next(own, None)
    if position is None:
        return None
    while calls[position].read:
        inputs = set(calls[position].inputs)
        before = (
            number
            for number, call in enumerate(calls[:position])
            if call.wrote and "inf" not in call.arguments and inputs.intersection(call.outputs)
        )
        if (position_before := next(before, None)) is None:
            break
        position = position_before
    return position
