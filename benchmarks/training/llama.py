"""The effect of each lever on Llama 3 8B: A/B pairs of adjacent launches, one lever at a time, beside torchtitan.

Run: python -m pytest benchmarks/training/llama.py -s --aorta-gpus=1
One GPU trains 8 blocks of the 8B in a world of one; 2, 4 and 8 GPUs train all 32. Each GPU has batch 1 x 8192. Both
sides of a pair have the same checkpointing, unless it is the lever. A change of step time and its 95% interval are
those of the plugin's A/B: the mean of winsorized differences of pairs, with its prior of the launches' variance. Both
sides are timed by the same timer, torchtitan too.

Environment variables: LLAMA_OUT, a folder for llama.md and llama.json, which are rewritten after each pair;
LLAMA_PAIRS, pairs of a lever (3); LLAMA_BUDGET_S, seconds after which no pair starts; LLAMA_LEVERS, texts of which the
name of a lever has to contain one, separated by semicolons; LLAMA_TINY=1, the debug model on a CPU rank, to try the
program.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.training.llama_8b import (
    FSDP2,
    SEQ_LEN,
    SIMPLE,
    STEPS,
    TITAN_8B,
    TITAN_SIMPLE,
    TORCHTITAN,
    WARMUP,
    measured,
)
from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise.priors import prior_variance
from pytest_aorta.verdict.statistics.decision import decide_pairs

TINY = bool(os.environ.get("LLAMA_TINY"))
PAIRS = int(os.environ.get("LLAMA_PAIRS", "3"))
METRIC = METRICS["step_time_p50"]
SELECTIVE, NO_CHECKPOINTING = {"activation_checkpointing": "selective"}, {"activation_checkpointing": "none"}


@dataclass(frozen=True)
class Side:
    """A program and its settings: config keys of a workload, or options of torchtitan."""

    program: str
    config: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __or__(self, changed: dict[str, Any]) -> Side:
        """Return the same with other config keys."""
        return Side(self.program, self.config | changed, self.options)


EAGER = Side(FSDP2, SELECTIVE)
COMPILED = EAGER | {"compile_blocks": True, "compile_loss": True}
INDUCTOR = Side(SIMPLE, SELECTIVE | {"backend": "inductor", "compile_loss": True, "bucketing": "transformer_block"})
CHUNKS = {"loss_chunks": 8}
TITAN_EAGER = Side(TORCHTITAN)
TITAN_COMPILED = Side(TORCHTITAN, options=("--compile.enable",))
TITAN_WITHOUT_AC = Side(TORCHTITAN, options=("--compile.enable", "--activation_checkpoint.mode=none"))
# The reference of each pair, and the side with the lever.
LEVERS: dict[str, tuple[Side, Side]] = {
    "compile_blocks": (EAGER, EAGER | {"compile_blocks": True}),
    "compile_loss": (EAGER, EAGER | {"compile_loss": True}),
    "loss_chunks 8, eager": (EAGER, EAGER | CHUNKS),
    "loss_chunks 8, compiled": (COMPILED, COMPILED | CHUNKS),
    "no checkpointing": (COMPILED, COMPILED | NO_CHECKPOINTING),
    "full checkpointing": (COMPILED, COMPILED | {"activation_checkpointing": "full"}),
    "SimpleFSDP inductor for eager FSDP2": (EAGER, INDUCTOR),
    "SimpleFSDP inductor, loss_chunks 8, for eager FSDP2": (EAGER, INDUCTOR | CHUNKS),
    "bucketing auto": (INDUCTOR, INDUCTOR | {"bucketing": "auto"}),
    "attention flash": (COMPILED, COMPILED | {"attention": "flash"}),
    "attention flex": (COMPILED, COMPILED | {"attention": "flex"}),
    "deterministic": (COMPILED, COMPILED | {"deterministic": True}),
    "reshard_after_forward false": (COMPILED, COMPILED | {"reshard_after_forward": False}),
    "forward_prefetch 1": (COMPILED, COMPILED | {"forward_prefetch": 1}),
    "optimizer_fused false": (COMPILED, COMPILED | {"optimizer_fused": False}),
    "ours for torchtitan, compiled": (TITAN_COMPILED, COMPILED),
    "ours for torchtitan, eager": (TITAN_EAGER, EAGER),
    "ours for torchtitan, SimpleFSDP inductor": (Side(TORCHTITAN, options=tuple(TITAN_SIMPLE)), INDUCTOR),
    "ours for torchtitan, compiled, no checkpointing": (TITAN_WITHOUT_AC, COMPILED | NO_CHECKPOINTING),
}
CHOSEN = [name for name in LEVERS if any(part in name for part in os.environ.get("LLAMA_LEVERS", "").split(";"))]


@dataclass
class Launched:
    """The measurements of one launch; memory is NaN on CPU."""

    step_p50_ms: float
    allocated_gib: float
    reserved_gib: float
    loss: list[float]


@dataclass
class Lever:
    """All pairs of one lever so far, reference first."""

    name: str
    pairs: list[tuple[Launched, Launched]] = field(default_factory=list)
    error: str = ""

    def change(self, device: str) -> tuple[float, float, float]:
        """Return the relative change of the step time, and its 95% interval."""
        differences = [math.log(lever.step_p50_ms / reference.step_p50_ms) for reference, lever in self.pairs]
        within = prior_variance(METRIC, device, ()).within
        decision = decide_pairs(differences, within, 0.01, max_pairs=PAIRS, worse=METRIC.worse)
        return math.expm1(decision.effect), math.expm1(decision.low), math.expm1(decision.high)

    def cells(self, device: str) -> list[str]:
        """Return the row of the table."""
        if not self.pairs:
            return [self.name, f"failed: {self.error.splitlines()[0][:200]}", *[""] * 5]
        sides = list(zip(*self.pairs, strict=True))
        change, low, high = self.change(device)
        times, allocated, reserved = (
            [median(getattr(launch, name) for launch in side) for side in sides]
            for name in ("step_p50_ms", "allocated_gib", "reserved_gib")
        )
        losses = [f"{side[0].loss[0]:.3f} to {side[0].loss[-1]:.3f}" if side[0].loss else "" for side in sides]
        return [
            self.name,
            f"{times[0]:.1f} to {times[1]:.1f} ms",
            f"{change:+.1%} [{low:+.1%}, {high:+.1%}]",
            f"{1e3 * SEQ_LEN / times[0]:,.0f} to {1e3 * SEQ_LEN / times[1]:,.0f}" if not TINY else "",
            f"{allocated[0]:.1f} to {allocated[1]:.1f} GiB",
            f"{reserved[0]:.1f} to {reserved[1]:.1f} GiB",
            "; ".join(losses),
        ]


@dataclass
class Ablation:
    """All levers so far, rewritten after each pair, since the run may end at any time."""

    began_s: float = field(default_factory=time.monotonic)
    device: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    levers: list[Lever] = field(default_factory=list)

    def text(self) -> str:
        """Return the rows as Markdown."""
        heads = ["lever", "step", "change [95%]", "tokens/s a GPU", "allocated", "reserved", "losses"]
        lines = [heads, ["---"] * len(heads), *(lever.cells(self.device) for lever in self.levers)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def write(self) -> None:
        """Rewrite both files."""
        if not (folder := os.environ.get("LLAMA_OUT")):
            return
        document = {"facts": self.facts, "levers": list(map(asdict, self.levers))}
        Path(folder, "llama.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        facts = "\n".join(f"- {key}: {value}" for key, value in self.facts.items())
        Path(folder, "llama.md").write_text(f"{facts}\n\n{self.text()}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def ablation() -> Iterator[Ablation]:
    """Return the table of the run, and print it at the end."""
    table = Ablation()
    yield table
    print(f"\n{table.facts}\n{table.text()}", flush=True)


def launch(world: DistributedWorld, side: Side) -> WorkloadResult:
    """Launch one side of a pair."""
    n_layers = 8 if world.size == 1 else 32
    if side.program == TORCHTITAN:
        arguments = (str(WARMUP + 3), str(n_layers), *TITAN_8B, *side.options)
        return world.launch_script("benchmarks/training/torchtitan_llama.py", arguments)
    size = {"size": "debug"} if TINY else {"size": "8b", "n_layers": n_layers}
    return world.launch(side.program, **size, warmup=WARMUP, steps=STEPS, profile_steps=0, **side.config)


def measurements(result: WorkloadResult) -> Launched:
    """Return what the table shows of a launch."""
    if result.device == "cpu":
        return Launched(median(map(float, result.step_times_ms)), math.nan, math.nan, list(result.loss))
    row = measured("", result, SEQ_LEN)
    return Launched(row.step_p50_ms, row.peak_allocated_gib, row.peak_reserved_gib, row.loss)


@pytest.mark.world(size=1 if TINY else "all", device="cpu" if TINY else "cuda", warm=True)
@pytest.mark.launch_timeout(240)
@pytest.mark.parametrize("name", CHOSEN)
def test_lever(distributed_world: DistributedWorld, ablation: Ablation, name: str) -> None:
    """Measure the pairs of one lever, in alternating order."""
    reference, lever = LEVERS[name]
    if TORCHTITAN in (reference.program, lever.program):
        if importlib.util.find_spec("torchtitan") is None:
            pytest.skip("torchtitan is not installed")
        ablation.facts["torchtitan"] = importlib.metadata.version("torchtitan")
    row = Lever(name)
    ablation.levers.append(row)
    try:
        for number in range(PAIRS):
            if time.monotonic() - ablation.began_s > float(os.environ.get("LLAMA_BUDGET_S", "inf")):
                break
            sides = [reference, lever]
            order = [0, 1] if number % 2 else [1, 0]
            results = {position: launch(distributed_world, sides[position]) for position in order}
            facts = results[1].environment
            ablation.device = results[1].device
            ablation.facts |= {"platform": distributed_world.platform, "torch": facts.get("torch")}
            row.pairs.append((measurements(results[0]), measurements(results[1])))
            ablation.write()
    except AortaError as error:
        row.error = str(error)
        ablation.write()
        pytest.fail(str(error), pytrace=False)
    if not row.pairs:
        ablation.levers.remove(row)
        pytest.skip("LLAMA_BUDGET_S is over")
    print(f"\n{' | '.join(row.cells(ablation.device))}", flush=True)
