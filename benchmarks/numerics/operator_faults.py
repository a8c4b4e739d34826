"""Planted faults, and whether the first operator that differs is named correctly.

Run: python -m pytest benchmarks/numerics/operator_faults.py -s -o aorta_workloads=tests/distributed/workloads
Environment variable: FAULTS, the number of faults of each variant and kind, 60 by default.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta import ComparisonFailed, DistributedWorld, WorkloadRunner
from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.rank_files import OperatorCall
from pytest_aorta.verdict.bitwise import (
    HASH_OPERATORS_STEP,
    STEP_METRICS,
    Evidence,
    FirstOperator,
    first_difference,
    first_operators,
    read_all_operators,
)

STEP = 2
# The batch of the step after the fault's is needed where two batches are swapped.
STEPS = 3
MEASURED = {"steps": STEPS, "warmup": 0, "hash_every": 1, "profile_steps": 0}
PLAIN_SCRIPT = "plain script"
VARIANTS: dict[str, dict[str, Any]] = {
    "llama_fsdp2": {"workload": "llama_fsdp2"},
    "llama_fsdp2, selective AC": {"workload": "llama_fsdp2", "activation_checkpointing": "selective"},
    "llama_simple_fsdp, aot_eager": {"workload": "llama_simple_fsdp", "backend": "aot_eager"},
    "llama_simple_fsdp, aot_eager, selective AC": {
        "workload": "llama_simple_fsdp",
        "backend": "aot_eager",
        "activation_checkpointing": "selective",
    },
    "llama_simple_fsdp, inductor": {"workload": "llama_simple_fsdp", "backend": "inductor"},
    "ddp_overlap": {"workload": "ddp_overlap", "loss_scale": 1024, "max_grad_norm": 1.0},
    PLAIN_SCRIPT: {"script": "benchmarks/numerics/plain_script.py"},
}
OUTPUT, INPUT, INTEGER, SWAPPED = "operator_output", "operator_input", "batch_integer", "swapped_batches"
Calls = dict[int, list[OperatorCall]]


@dataclass(frozen=True)
class Planted:
    """A fault on one rank or all.

    Attributes:
        kind: a flipped bit in an operator's output or in a collective's input, another integer in a batch, or two
            swapped batches.
        call: the operator's call; None for a fault of the batch.
        number: the number of the operator's call, or of the integer.
        rank: the rank; None is all.
    """

    kind: str
    call: OperatorCall | None
    number: int
    rank: int | None

    def config(self) -> dict[str, Any]:
        """Return the block ``fault`` of the launch's config."""
        name = self.call.name if self.call else ""
        return {"kind": self.kind, "step": STEP, "rank": self.rank, "operator": name, "call": self.number}

    def __str__(self) -> str:
        """Return the fault for a log."""
        return f"{self.kind} of {self.call.name if self.call else 'the batch'} #{self.number} on rank {self.rank}"


def in_operators(calls: Calls, choose: random.Random) -> Iterator[Planted]:
    """Yield flipped bits: one in five in a collective's input, one in four on all ranks, and the operators in turn."""
    calls_of = numbered(calls[0])
    collectives = [pair for named in calls_of.values() for pair in named if pair[1].is_collective]
    computing = [named for named in calls_of.values() if not named[0][1].is_collective and named[0][1].outputs]
    choose.shuffle(computing)
    for turn in range(4 * len(calls[0])):
        is_input = turn % 5 == 4 and bool(collectives)
        number, call = choose.choice(collectives if is_input else computing[turn % len(computing)])
        rank = None if turn % 4 == 3 else choose.randrange(len(calls))
        yield Planted(INPUT if is_input else OUTPUT, call, number, rank)


def in_data(calls: Calls, choose: random.Random) -> Iterator[Planted]:
    """Yield other integers in a batch, swapped batches, and flipped bits in copied integers, in turn."""
    copies = [
        (number, call)
        for named in numbered(calls[0]).values()
        for number, call in named
        if "copy" in call.name and all(source.startswith("torch.int") for source in call.sources)
    ]
    for turn in range(1000):
        rank = None if turn % 4 == 3 else choose.randrange(len(calls))
        if turn % 3 == 2 and copies:
            number, call = choose.choice(copies)
            yield Planted(OUTPUT, call, number, rank)
        else:
            yield Planted(SWAPPED if turn % 3 else INTEGER, None, choose.randrange(1, 1000), rank)


KINDS: dict[str, Callable[[Calls, random.Random], Iterator[Planted]]] = {
    "operators": in_operators,
    "data": in_data,
}


@pytest.mark.world(size="all", warm=True)
@pytest.mark.launch_timeout(300)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_planted_faults_are_named(
    workload: WorkloadRunner, distributed_world: DistributedWorld, variant: str, kind: str
) -> None:
    """Plant faults until enough changed the step, and print how many were named correctly, not at all, or wrongly."""
    reference = launched(workload, VARIANTS[variant], {}, STEP)
    wanted = int(os.environ.get("FAULTS", "60"))
    found: Counter[str] = Counter()
    for planted in KINDS[kind](operators(distributed_world, reference), random.Random(variant)):
        if compared(found) == wanted:
            break
        try:
            candidate = launched(workload, VARIANTS[variant], planted.config(), STEP)
            outcome, shown = judged(distributed_world, planted, candidate, reference)
        except AortaError as error:
            if "has no tensor to flip a bit in" in str(error):
                continue
            # Ranks that report different norms or hold different replicas are refused before anything is compared.
            outcome, shown = judged_failure(distributed_world, planted, str(error), reference)
        found[outcome] += 1
        print(f"\n{outcome}: {planted}: {shown}")
    print(f"\n{variant}, {kind}: {json.dumps(found)}")
    assert compared(found) == wanted, "not enough operators to plant faults in"


@pytest.mark.world(size=2, warm=True)
@pytest.mark.parametrize("variant", ["unwaited", PLAIN_SCRIPT])
def test_a_result_that_is_read_before_its_collective_ends_is_explained(workload: WorkloadRunner, variant: str) -> None:
    """Plant missing waits, of sharded weights and of replicas, and count what is said of them."""
    told: Counter[str] = Counter()
    for number in range(wanted := int(os.environ.get("FAULTS", "60"))):
        if variant == PLAIN_SCRIPT:
            try:
                launched(workload, VARIANTS[variant], {"kind": "unwaited", "step": STEP, "rank": number % 2}, 0)
                told["the launch passed"] += 1
            except AortaError as error:
                told[re.findall(r"replicas of .*|have to be equal.*", str(error))[0]] += 1
            continue
        # The race lasts, or the captured step is its only one.
        race = {"workload": variant, "unwaited_from": STEP, "unwaited_to": STEP if number % 2 else STEPS}
        with pytest.raises(ComparisonFailed) as regression:
            workload.compare(race, {"workload": variant}, steps=STEPS, metrics=["weight_hash"], locate=True)
        told.update(re.findall(r"launched once more, (.*)", str(regression.value)) or [str(regression.value)])
    for text, count in told.items():
        print(f"\n{variant}, race: {count} of {wanted}: {text}")


def launched(workload: WorkloadRunner, variant: dict[str, Any], fault: dict[str, Any], captured: int) -> WorkloadResult:
    """Launch a variant with a fault and with a captured step; 0 captures none."""
    if script := variant.get("script"):
        return workload.run_script(script, [str(STEPS), json.dumps(fault), str(captured)])
    config = {key: value for key, value in variant.items() if key != "workload"}
    return workload.run(
        variant["workload"], **config, **MEASURED, **{HASH_OPERATORS_STEP: captured or None, "fault": fault}
    )


def compared(found: Counter[str]) -> int:
    """Return the number of faults that changed the step and were to be located; a rank may crash within it."""
    return found.total() - found["masked"] - found["crashed"]


def operators(world: DistributedWorld, result: WorkloadResult) -> Calls:
    """Return the captured calls of each rank."""
    launch = world.launcher.find(result)
    assert launch is not None
    return read_all_operators(launch.plan.run_dir, result.world_size, STEP)


def numbered(calls: list[OperatorCall]) -> dict[str, list[tuple[int, OperatorCall]]]:
    """Return the calls of each operator, numbered from 1."""
    calls_of: dict[str, list[tuple[int, OperatorCall]]] = defaultdict(list)
    for call in calls:
        calls_of[call.name].append((len(calls_of[call.name]) + 1, call))
    return calls_of


def judged(
    world: DistributedWorld, planted: Planted, candidate: WorkloadResult, reference: WorkloadResult
) -> tuple[str, str]:
    """Return the outcome, and a text about the named call."""
    if first_difference(candidate, reference, STEP, list(STEP_METRICS)) is None:
        return "masked", "no loss, norm or weight differs"
    calls = operators(world, candidate)
    first = next(iter(first_operators(calls, operators(world, reference))), None)
    if first is None:
        return "not named", "all operators are equal"
    shown = f"{first.call.name} in {first.call.phase} on rank {first.rank}: {first.explanation}"
    if is_right(planted, first, calls):
        return "right", shown
    return ("wrong" if first.evidence in (Evidence.COMPUTED, Evidence.RECEIVED) else "not named"), shown


def judged_failure(world: DistributedWorld, planted: Planted, text: str, reference: WorkloadResult) -> tuple[str, str]:
    """Return the outcome of a launch that failed, from the operators in its folder, and a text."""
    folder = Path(re.findall(r"(/\S+/\d\d+-[\w.-]+)", text)[-1].rstrip(":"))
    if not (calls := read_all_operators(folder, reference.world_size, STEP)):
        return "crashed", text[:300]
    first = next(iter(first_operators(calls, operators(world, reference))), None)
    is_named = first is not None and is_right(planted, first, calls)
    named = "nothing" if first is None else f"{first.call.name} on rank {first.rank} ({first.evidence.name})"
    return f"failed, {'right' if is_named else 'wrong'}", f"{named}; {text[:300]}"


def is_right(planted: Planted, first: FirstOperator, calls: Calls) -> bool:
    """Return whether the named call is the planted one, or for a fault of the batch, reads what no operator wrote."""
    if planted.rank not in (None, first.rank):
        return False
    if planted.call is None:
        return first.evidence is Evidence.CHANGED and first.call.phase == "forward"
    _, call = numbered(calls[first.rank])[planted.call.name][planted.number - 1]
    is_sure = planted.kind == OUTPUT or first.evidence is Evidence.CHANGED
    return is_sure and first.call is call
