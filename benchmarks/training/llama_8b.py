"""Tokens per second and peak memory of Llama 3 8B, batch 1 x 8192, selective checkpointing, on all GPUs of the run.

Run: python -m pytest benchmarks/training/llama_8b.py -s --aorta-gpus=4
Every variant is a launch of its own, the most important variants first; a variant that fails prints the cause and does
not stop the others. Variants of torchtitan need the package installed. Environment variables: LLAMA_OUT, a folder for
llama_8b.md and llama_8b.json, which are rewritten after each variant; LLAMA_BUDGET_S, seconds after which no variant
starts; LLAMA_VARIANTS, texts that names of variants have to contain, separated by commas.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.world import DistributedWorld

SEQ_LEN, WARMUP, STEPS = 8192, 5, 12
SIMPLE, FSDP2, TORCHTITAN = "llama_simple_fsdp", "llama_fsdp2", "torchtitan"
FUSED = {"backend": "inductor", "compile_loss": True}
TRACED = {"backend": "aot_eager", "compile_loss": True}
TP2 = {"tensor_parallel_degree": 2}
# The `llama3_8b.toml` of torchtitan 0.2.2, for as many steps, and its own log of the last ten.
TITAN_8B = [
    *("--model.name=synthetic.llama3", "--model.flavor=8B", "--optimizer.lr=3e-4", "--lr_scheduler.warmup_steps=200"),
    *("--training.local_batch_size=1", f"--training.seq_len={SEQ_LEN}", f"--training.steps={WARMUP + STEPS + 3}"),
    *("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    *("--metrics.log_freq=10", "--metrics.disable_color_printing"),
]
TITAN_SIMPLE = [
    *("--model.name=synthetic.simple_fsdp.llama3", "--compile.enable", "--compile.backend=inductor"),
    *("--job.custom_config_module=torchtitan.experiments.simple_fsdp.job_config",),
    *("--compile.graph_passes=transformer_block_bucketing",),
]
VARIANTS: dict[str, tuple[str, Any]] = {
    "FSDP2 compile": (FSDP2, {"compile_blocks": True, "compile_loss": True}),
    "torchtitan FSDP2 compile": (TORCHTITAN, ["--compile.enable"]),
    "SimpleFSDP block inductor": (SIMPLE, FUSED | {"bucketing": "transformer_block"}),
    "FSDP2 eager": (FSDP2, {}),
    "SimpleFSDP auto inductor": (SIMPLE, FUSED | {"bucketing": "auto"}),
    "SimpleFSDP block aot_eager": (SIMPLE, TRACED | {"bucketing": "transformer_block"}),
    "torchtitan FSDP2 eager": (TORCHTITAN, []),
    "SimpleFSDP auto aot_eager": (SIMPLE, TRACED | {"bucketing": "auto"}),
    "FSDP2 x TP=2 compile": (FSDP2, TP2 | {"compile_blocks": True, "compile_loss": True}),
    "SimpleFSDP x TP=2 block inductor": (SIMPLE, TP2 | FUSED | {"bucketing": "transformer_block"}),
    "torchtitan SimpleFSDP block inductor": (TORCHTITAN, TITAN_SIMPLE),
}
CHOSEN = [name for name in VARIANTS if any(part in name for part in os.environ.get("LLAMA_VARIANTS", "").split(","))]


@dataclass
class Row:
    """The measurements of one variant, or the cause of its failure."""

    variant: str
    tokens_per_s_per_gpu: float = float("nan")
    step_p50_ms: float = float("nan")
    step_times_ms: list[float] = field(default_factory=list)
    peak_allocated_gib: float = float("nan")
    peak_reserved_gib: float = float("nan")
    logged_tokens_per_s_per_gpu: float | None = None
    loss: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    error: str = ""

    def line(self) -> str:
        """Return the row of the table."""
        if self.error:
            return (
                f"| {self.variant} | failed after {self.wall_s:.0f} s: {self.error.splitlines()[0][:300]} | | | | | |"
            )
        logged = "" if self.logged_tokens_per_s_per_gpu is None else f"{self.logged_tokens_per_s_per_gpu:,.0f}"
        loss = f"{self.loss[0]:.3f} to {self.loss[-1]:.3f}" if self.loss else ""
        return (
            f"| {self.variant} | {self.tokens_per_s_per_gpu:,.0f} | {logged} | {self.step_p50_ms:.1f} | "
            f"{self.peak_allocated_gib:.1f} | {self.peak_reserved_gib:.1f} | {loss} |"
        )


@dataclass
class Table:
    """All rows so far, which are written and printed as variants end."""

    began_s: float = field(default_factory=time.monotonic)
    platform: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def text(self) -> str:
        """Return the rows as markdown."""
        head = "| variant | tokens/s a GPU | as logged | step p50, ms | allocated, GiB | reserved, GiB | loss |"
        return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *(row.line() for row in self.rows)])

    def add(self, row: Row) -> None:
        """Add a row and rewrite all files, since the run may end at any time."""
        self.rows.append(row)
        print(f"\n{row.line()} {row.wall_s:.0f} s\n{row.error}", flush=True)
        if folder := os.environ.get("LLAMA_OUT"):
            document = {
                "platform": self.platform,
                "environment": self.environment,
                "rows": list(map(asdict, self.rows)),
            }
            Path(folder, "llama_8b.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
            Path(folder, "llama_8b.md").write_text(f"{self.platform}\n\n{self.text()}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Return the table of the run, and print it again at the end."""
    table = Table()
    yield table
    print(f"\n{table.platform}\n{table.text()}", flush=True)


def measured(variant: str, result: WorkloadResult, tokens: float) -> Row:
    """Return the row of a launch in which each GPU trains on ``tokens`` per step."""
    metrics = result.rank_metrics
    if "torchtitan_tokens_per_s" in metrics:
        memory_gib = [max(metrics[f"torchtitan_memory_{kind}_gib"]) for kind in ("active", "reserved")]
        logged = median(metrics["torchtitan_tokens_per_s"])
    else:
        memory_gib = [max(metrics[f"peak_memory{kind}_bytes"]) / 2**30 for kind in ("", "_reserved")]
        logged = None
    times_ms = [float(value) for value in result.step_times_ms]
    step_ms = median(times_ms)
    return Row(variant, tokens / step_ms * 1e3, step_ms, times_ms, *memory_gib, logged, list(result.loss))


def launch(world: DistributedWorld, variant: str) -> tuple[WorkloadResult, float]:
    """Launch a variant; return its result and the tokens per GPU and step."""
    workload, config = VARIANTS[variant]
    if workload == TORCHTITAN:
        # torchtitan's options are read left to right, the last one counts.
        arguments = (str(WARMUP + 3), "32", *TITAN_8B, *config)
        return world.launch_script("benchmarks/training/torchtitan_llama.py", arguments), SEQ_LEN
    size = {"size": "8b", "activation_checkpointing": "selective", "warmup": WARMUP, "steps": STEPS}
    return world.launch(workload, **size, **config), SEQ_LEN / config.get("tensor_parallel_degree", 1)


@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.launch_timeout(200)
@pytest.mark.parametrize("variant", CHOSEN)
def test_llama_8b(distributed_world: DistributedWorld, table: Table, variant: str) -> None:
    """Print one row per variant."""
    table.platform = distributed_world.platform
    began_s = time.monotonic()
    if began_s - table.began_s > float(os.environ.get("LLAMA_BUDGET_S", "inf")):
        pytest.skip("LLAMA_BUDGET_S is over")
    if VARIANTS[variant][0] == TORCHTITAN and importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    try:
        result, tokens = launch(distributed_world, variant)
    except AortaError as error:
        table.add(Row(variant, wall_s=time.monotonic() - began_s, error=str(error)))
        pytest.fail(str(error), pytrace=False)
    table.environment = dict(result.environment)
    row = measured(variant, result, tokens)
    row.wall_s = time.monotonic() - began_s
    table.add(row)
