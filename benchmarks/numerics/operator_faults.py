"""Planted one-bit faults, and whether the first operator that differs is named correctly.

Run: python -m pytest benchmarks/numerics/operator_faults.py -s
Environment variable: FAULTS, the number of faults of each variant, 60 by default.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.rank_files import OperatorCall
from pytest_aorta.session.launcher import DistributedWorld
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.verdict.bitwise import (
    STEP_METRICS,
    Evidence,
    FirstOperator,
    first_difference,
    first_operators,
    read_all_operators,
)

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
    "ddp_overlap": {"workload": "ddp_overlap", "loss_scale": 1024, "max_grad_norm": 1.0},
    "plain script": {"script": "benchmarks/numerics/plain_script.py"},
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

    def launched(**fault: Any) -> WorkloadResult:
        if script := config.get("script"):
            return workload.run_script(script, [str(STEP), json.dumps(fault.get("fault", {}))])
        return workload.run(config["workload"], **{key: config[key] for key in config if key != "workload"}, **fault)

    reference = launched()
    wanted = int(os.environ.get("FAULTS", "60"))
    found: Counter[str] = Counter()
    for planted in draws(operators(distributed_world, reference), random.Random(variant)):
        if compared(found) == wanted:
            break
        try:
            outcome, shown = judged(distributed_world, planted, launched(**planted.config()), reference)
        except AortaError as error:
            if "has no floating-point tensor" in str(error):
                continue
            # Ranks that report different norms or hold different replicas are refused before anything is compared.
            outcome, shown = judged_failure(distributed_world, planted, str(error), reference)
        found[outcome] += 1
        print(f"\n{outcome}: {planted.kind} of {planted.call.name} #{planted.number} on rank {planted.rank}: {shown}")
    print(f"\n{variant}: {json.dumps(found)}")
    assert compared(found) == wanted, "not enough operators to plant faults in"


def compared(found: Counter[str]) -> int:
    """Return the number of faults that changed the step and were to be located."""
    return found.total() - found["masked"]


def operators(world: DistributedWorld, result: WorkloadResult) -> dict[int, list[OperatorCall]]:
    """Return the captured calls of each rank."""
    launch = world.launcher.find(result)
    assert launch is not None
    return read_all_operators(launch.plan.run_dir, result.world_size, STEP)


def draws(calls: dict[int, list[OperatorCall]], choose: random.Random) -> Iterator[Planted]:
    """Yield faults: one in five in a collective's input, one in four on all ranks, and the operators in turn."""
    calls_of: dict[str, list[tuple[int, OperatorCall]]] = defaultdict(list)
    for call in calls[0]:
        calls_of[call.name].append((len(calls_of[call.name]) + 1, call))
    collectives = [pair for named in calls_of.values() for pair in named if pair[1].is_collective]
    computing = [named for named in calls_of.values() if not named[0][1].is_collective and named[0][1].outputs]
    choose.shuffle(computing)
    for turn in range(4 * sum(map(len, calls_of.values()))):
        is_input = turn % 5 == 4 and bool(collectives)
        number, call = choose.choice(collectives if is_input else computing[turn % len(computing)])
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


def judged_failure(world: DistributedWorld, planted: Planted, text: str, reference: WorkloadResult) -> tuple[str, str]:
    """Return the outcome of a launch that failed, from the operators in its folder, and a text."""
    folder = Path(re.findall(r"(/\S+/\d\d-[\w.-]+)", text)[-1].rstrip(":"))
    calls = read_all_operators(folder, reference.world_size, STEP)
    first = next(iter(first_operators(calls, operators(world, reference))), None)
    is_named = first is not None and is_right(planted, first)
    named = "nothing" if first is None else f"{first.call.name} on rank {first.rank} ({first.evidence.name})"
    return f"failed, {'right' if is_named else 'wrong'}", f"{named}; {text[:300]}"


def is_right(planted: Planted, first: FirstOperator) -> bool:
    """Return whether the named call is the planted one: its name, place and rank."""
    place = (planted.call.name, planted.call.phase, planted.call.module)
    return (first.call.name, first.call.phase, first.call.module) == place and planted.rank in (None, first.rank)
