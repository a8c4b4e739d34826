"""The effect of each lever on Llama 3 8B, one at a time, in A/B pairs of adjacent launches, beside torchtitan.

Run: LLAMA_OUT=FOLDER LLAMA_BUDGET_S=480 python -m pytest benchmarks/training/llama.py -s --aorta-gpus=1
One GPU trains 8 blocks of the 8B in a world of one; 2, 4 and 8 GPUs train all 32. Each GPU has batch 1 x 8192. Both
programs of a pair have the same checkpointing, unless it is the lever, and torchtitan reads the same tokens. All step
times come from the same timer. The plugin's A/B computes the change of step time and its 95% interval: the mean of
winsorized differences of pairs, with its prior for the variance of launches.

Each round measures all levers, the most important first, so that a round cut short by the budget has measured those.
Two levers share one launch of their reference, between their own launches. Rounds alternate in order.

Environment variables: LLAMA_OUT, a folder for llama.md and llama.json, which are rewritten after each launch;
LLAMA_BUDGET_S, seconds in which all launches are expected to end; LLAMA_ROUNDS, pairs of a lever (3); LLAMA_LEVERS,
texts separated by semicolons, one of which the name of a lever has to contain; LLAMA_BLOCKS, another number of blocks;
LLAMA_TINY=N, the debug model on N CPU ranks, to try the program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.ablation import Ablation, Lever, triples
from benchmarks.training.programs import (
    COMPILE,
    FSDP2,
    SEQ_LEN,
    SIMPLE,
    TINY_TOKENS,
    TITAN_SIMPLE,
    TORCHTITAN,
    TORCHTITAN_VERSION,
    Length,
    Measured,
    Program,
    launch_8b,
    launch_tiny,
    measured,
    torchtitan_refusal,
)
from pytest_aorta import DistributedWorld
from pytest_aorta.result.measurements import WorkloadResult

TINY = int(os.environ.get("LLAMA_TINY", "0"))
ROUNDS = int(os.environ.get("LLAMA_ROUNDS", "3"))
# A step of 8 blocks on one GPU takes a third of the time.
LENGTH, LENGTH_ON_ONE = Length(warmup=4, steps=10), Length(warmup=4, steps=20)

_SELECTIVE = {"activation_checkpointing": "selective", "profile_steps": 0}
EAGER = Program("FSDP2 eager", FSDP2, _SELECTIVE)
COMPILED = Program("FSDP2 compiled", FSDP2, _SELECTIVE | {"compile_blocks": True, "compile_loss": True})
INDUCTOR = Program(
    "SimpleFSDP inductor",
    SIMPLE,
    _SELECTIVE | {"backend": "inductor", "compile_loss": True, "bucketing": "transformer_block"},
)
# Two GPUs share two sequences, so that each has as many tokens as without tensor parallelism.
TP2 = COMPILED.with_keys("TP 2", tensor_parallel_degree=2, batch_size=2)
TITAN_EAGER = Program("torchtitan FSDP2 eager", TORCHTITAN)
TITAN_COMPILED = Program("torchtitan FSDP2 compiled", TORCHTITAN, options=COMPILE)
TITAN_INDUCTOR = Program("torchtitan SimpleFSDP inductor", TORCHTITAN, options=TITAN_SIMPLE)
TITAN_WITHOUT_AC = Program(
    "torchtitan FSDP2 compiled, no checkpointing",
    TORCHTITAN,
    options=(*COMPILE, "--activation_checkpoint.mode=none"),
)
TITAN_TP2 = Program(
    "torchtitan FSDP2 compiled, TP 2",
    TORCHTITAN,
    options=(*COMPILE, "--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=2"),
)
WITHOUT_AC = COMPILED.with_keys("no checkpointing", activation_checkpointing="none")
# The fastest forms of both programs.
TITAN_FASTEST = Program(
    "torchtitan FSDP2 compiled, fastest",
    TORCHTITAN,
    options=(*TITAN_WITHOUT_AC.options, "--parallelism.fsdp_reshard_after_forward=never"),
)
TITAN_FLOAT8 = Program(
    "torchtitan FSDP2 compiled, fastest, float8",
    TORCHTITAN,
    options=(*TITAN_FASTEST.options, "--model.converters=quantize.linear.float8"),
)
FASTEST = {"activation_checkpointing": "none", "optimizer": "compiled"}
# A world of one shards nothing, so what stays gathered are copies in the dtype of compute.
GATHERED_ONCE = {"reshard_after_forward": False}
# CPU ranks have no device whose memory could be the budget.
AUTO = {"activation_checkpointing": "auto"} | ({"memory_budget_bytes": 1 << 28} if TINY else {})


def _key(reference: Program, name: str, min_gpus: int = 1, /, **config: Any) -> Lever:
    """Return a lever that changes config keys of ``reference``."""
    return Lever(f"{reference.name}: {name}", reference, reference.with_keys(name, **config), min_gpus)


def _instead(reference: Program, program: Program, min_gpus: int = 1) -> Lever:
    """Return a lever that launches another program."""
    return Lever(f"{program.name} for {reference.name}", reference, program, min_gpus)


# The most important first. A world of one has nothing to gather, and torchtitan does not shard there.
LEVERS = (
    _instead(EAGER, COMPILED),
    _key(EAGER, "rotary real", rotary="real"),
    _instead(EAGER, INDUCTOR),
    _key(EAGER, "loss_chunks 8", loss_chunks=8),
    _instead(TITAN_EAGER, EAGER, 2),
    _instead(TITAN_COMPILED, COMPILED, 2),
    _key(COMPILED, "no checkpointing", activation_checkpointing="none"),
    _key(COMPILED, "loss_chunks 8", loss_chunks=8),
    _key(COMPILED, "checkpointing auto", **AUTO),
    _key(INDUCTOR, "checkpointing auto", **AUTO),
    _key(EAGER, "elementwise checkpointing", activation_checkpointing="elementwise"),
    _key(COMPILED, "blocks_per_bucket 2", 2, blocks_per_bucket=2),
    _key(COMPILED, "all_gather copy_engine", 2, all_gather="copy_engine"),
    _key(COMPILED, "reshard_after_forward false", 2, reshard_after_forward=False),
    _key(COMPILED, "all_gather symmetric", 2, all_gather="symmetric"),
    _key(COMPILED, "blocks_per_bucket 4", 2, blocks_per_bucket=4),
    _key(INDUCTOR, "loss_chunks 8", loss_chunks=8),
    _key(INDUCTOR, "blocks_per_bucket 2", 2, blocks_per_bucket=2),
    _key(INDUCTOR, "bucketing auto", 2, bucketing="auto"),
    _key(TP2, "async_tensor_parallel", 2, async_tensor_parallel=True),
    _instead(TITAN_TP2, TP2, 2),
    _instead(TITAN_WITHOUT_AC, WITHOUT_AC, 2),
    _instead(TITAN_INDUCTOR, INDUCTOR, 2),
    _key(COMPILED, "full checkpointing", activation_checkpointing="full"),
    _key(COMPILED, "attention flex", attention="flex"),
    _instead(TITAN_FASTEST, INDUCTOR.with_keys("fastest", **FASTEST)),
    _instead(TITAN_FASTEST, COMPILED.with_keys("fastest", **FASTEST, **GATHERED_ONCE)),
    _instead(TITAN_FLOAT8, INDUCTOR.with_keys("fastest, float8", **FASTEST, float8_linear=True, float8_output=True)),
    _instead(TITAN_FLOAT8, COMPILED.with_keys("fastest, float8", **FASTEST, **GATHERED_ONCE, float8_linear=True)),
    _key(COMPILED, "deterministic", deterministic=True),
    _key(EAGER, "deterministic", deterministic=True),
    _key(COMPILED, "forward_prefetch 1", 2, forward_prefetch=1),
    _key(COMPILED, "attention flash", attention="flash"),
    _key(COMPILED, "optimizer unfused", optimizer="unfused"),
    _key(COMPILED, "optimizer compiled", optimizer="compiled"),
    _key(INDUCTOR, "optimizer compiled", optimizer="compiled"),
    _key(EAGER, "compile_blocks alone", compile_blocks=True),
    _key(EAGER, "compile_loss alone", compile_loss=True),
)
CHOSEN = [
    lever for lever in LEVERS if any(part in lever.name for part in os.environ.get("LLAMA_LEVERS", "").split(";"))
]


def refusal(lever: Lever, num_gpus: int) -> str | None:
    """Return why a lever is left out, or None if it can be measured."""
    if num_gpus < lever.min_gpus:
        return f"which needs {lever.min_gpus} GPUs"
    if TINY and lever.program.config.keys() & {"all_gather", "async_tensor_parallel"}:
        return "which needs GPUs"
    return torchtitan_refusal() if lever.reference.workload == TORCHTITAN else None


@pytest.fixture(scope="module")
def ablation() -> Iterator[Ablation]:
    """Return the table of the run, and print it at the end."""
    folder = os.environ.get("LLAMA_OUT")
    budget_s = float(os.environ.get("LLAMA_BUDGET_S", "inf"))
    table = Ablation(budget_s, Path(folder) if folder else None, "cpu" if TINY else "cuda")
    yield table
    print(f"\n{table.text()}", flush=True)


@pytest.mark.world(size=TINY or "all", device="cpu" if TINY else "cuda", warm=True)
@pytest.mark.launch_timeout(240)
@pytest.mark.parametrize("levers", triples(CHOSEN), ids=lambda levers: " | ".join(lever.name for lever in levers))
@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_levers(
    distributed_world: DistributedWorld, ablation: Ablation, levers: tuple[Lever, ...], number: int
) -> None:
    """Measure one pair of one or two levers."""
    num_ranks = distributed_world.size
    refusals = {lever.name: reason for lever in levers if (reason := refusal(lever, num_ranks))}
    ablation.left_out |= refusals
    ablation.write()
    runnable = [lever for lever in levers if lever.name not in refusals]
    if not runnable:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in refusals.items()))

    blocks = int(os.environ.get("LLAMA_BLOCKS", "8" if num_ranks == 1 else "32"))

    def launch(program: Program) -> Measured:
        if TINY:
            result = launch_tiny(distributed_world, program)
        else:
            result = launch_8b(distributed_world, program, blocks, LENGTH_ON_ONE if num_ranks == 1 else LENGTH)
        ablation.facts |= {"platform": distributed_world.platform, "ranks": num_ranks} | facts_of(result)
        if not TINY:
            ablation.facts["blocks"] = blocks
        return measured(result, TINY_TOKENS if TINY else SEQ_LEN)

    errors = ablation.run_round(runnable, launch, reverse=number % 2 == 0)
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    if not any(ablation.is_measured(lever) for lever in runnable):
        pytest.skip("LLAMA_BUDGET_S is over")


def facts_of(result: WorkloadResult) -> dict[str, str]:
    """Return versions of the libraries of a launch."""
    if "torchtitan_loss" in result.rank_metrics:
        return {"torchtitan": TORCHTITAN_VERSION}
    return {name: str(value) for name in ("torch", "nccl") if (value := result.environment.get(name)) is not None}
