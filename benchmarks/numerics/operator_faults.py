"""Planted one-bit faults, and whether the first operator that differs is named correctly.

Run: python -m pytest benchmarks/numerics/operator_faults.py -s
Environment variable: FAULTS, the number of faults of each variant, 13 by default.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.rank_files import OperatorCall, read_operators
from pytest_aorta.session.launcher import DistributedWorld
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.verdict.bitwise import STEP_METRICS, Evidence, FirstOperator, first_difference, first_operators

STEP = 2
CAPTURED = {"steps": STEP, "warmup": 0, "hash_every": 1, "hash_operators_step": STEP, "profile_steps": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama_fsdp2": {"workload": "llama_fsdp2"},
    "llama_fsdp2, selective AC": {"workload": "llama_fsdp2", "activation_checkpointing": "selective"},
    "llama_simple_fsdp, aot_eager": {"workload": "llama_simple_fsdp", "backend": "aot_eager"},
    "llama_simple_fsdp, aot_eager, selective AC": {
        "workload": "llama_simple_fsdp",
        "backend": "aot_eager",
        "activation_checkpointing": "selective",
    },
}
OUTPUT, INPUT = "operator_output", "operator_input"


@dataclass(frozen=True)
class Planted:
    """A fault: a flipped bit in an operator's output or in a collective's input, on one rank or all."""

    kind: str
    call: OperatorCall
    number: int
    rank: int | None

    def config(self) -> dict[str, Any]:
        """Return the config of the launch."""
        place = {"operator": self.call.name, "call": self.number}
        return {"fault": {"kind": self.kind, "step": STEP, "rank": self.rank, **place}}


@pytest.mark.world(size="all", warm=True)
@pytest.mark.launch_timeout(300)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_planted_faults_are_named(workload: WorkloadRunner, distributed_world: DistributedWorld, variant: str) -> None:
    """Plant faults until enough changed the step, and print how many were named correctly, not at all, or wrongly."""
    config = VARIANTS[variant] | CAPTURED
    name = config.pop("workload")
    reference = workload.run(name, **config)
    wanted = int(os.environ.get("FAULTS", "13"))
    found: Counter[str] = Counter()
    for planted in draws(operators(distributed_world, reference), random.Random(variant)):
        if compared(found) == wanted:
            break
        try:
            outcome, shown = judged(
                distributed_world, planted, workload.run(name, **config, **planted.config()), reference
            )
        except AortaError as error:
            # Ranks that report different norms are refused before anything is compared.
            outcome, shown = "refused", str(error)
        found[outcome] += 1
        print(f"\n{outcome}: {planted.kind} of {planted.call.name} #{planted.number} on rank {planted.rank}: {shown}")
    print(f"\n{variant}: {json.dumps(found)}")
    assert compared(found) == wanted, "not enough operators to plant faults in"


def compared(found: Counter[str]) -> int:
    """Return the number of faults that changed the step and were to be located."""
    return found.total() - found["masked"] - found["refused"]


def operators(world: DistributedWorld, result: WorkloadResult) -> dict[int, list[OperatorCall]]:
    """Return the captured calls of each rank."""
    launch = world.launcher.find(result)
    assert launch is not None
    calls = {rank: read_operators(launch.plan.run_dir, rank, STEP) for rank in range(result.world_size)}
    return {rank: found for rank, found in calls.items() if found is not None}


def draws(calls: dict[int, list[OperatorCall]], choose: random.Random) -> Iterator[Planted]:
    """Yield faults in random order: four in outputs for each one in a collective's input, one in four on all ranks."""
    numbered: list[tuple[int, OperatorCall]] = []
    seen: Counter[str] = Counter()
    for call in calls[0]:
        seen[call.name] += 1
        numbered.append((seen[call.name], call))
    computing = [pair for pair in numbered if not pair[1].is_collective and pair[1].outputs]
    collectives = [pair for pair in numbered if pair[1].is_collective]
    for turn in range(len(numbered)):
        is_input = turn % 5 == 4 and bool(collectives)
        number, call = choose.choice(collectives if is_input else computing)
        rank = None if turn % 4 == 3 else choose.randrange(len(calls))
        yield Planted(INPUT if is_input else OUTPUT, call, number, rank)


def judged(
    world: DistributedWorld, planted: Planted, candidate: WorkloadResult, reference: WorkloadResult
) -> tuple[str, str]:
    """Return the outcome, and a text about the named call."""
    if first_difference(candidate, reference, STEP, list(STEP_METRICS)) is None:
        return "masked", "no loss, norm or weight differs"
    first = next(iter(first_operators(operators(world, candidate), operators(world, reference))), None)
    if first is None:
        return "not named", "all operators are equal"
    if is_right(planted, first):
        return "right", str(first.evidence.name)
    certain = first.evidence in (Evidence.COMPUTED, Evidence.RECEIVED)
    shown = f"{first.call.name} in {first.call.phase} on rank {first.rank} ({first.evidence.name})"
    return ("wrong" if certain else "not named"), shown


def is_right(planted: Planted, first: FirstOperator) -> bool:
    """Return whether the named call is the planted one: its name, place and rank."""
    place = (planted.call.name, planted.call.phase, planted.call.module)
    return (first.call.name, first.call.phase, first.call.module) == place and planted.rank in (None, first.rank)
