"""Tokens per second and peak memory of Llama 3 8B, batch 1 x 8192, selective checkpointing, on all GPUs of the run.

Run: python -m pytest benchmarks/training/llama_8b.py -s --aorta-gpus=4
Every variant is a launch of its own, the most important variants first; a variant that fails prints the cause and does
not stop the others. Variants of torchtitan need the package installed. Environment variables: LLAMA_OUT, a folder for
llama_8b.md and llama_8b.json, which are rewritten after each variant; LLAMA_BUDGET_S, seconds after which no variant
starts; LLAMA_VARIANTS, texts that names of variants have to contain, separated by commas.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.programs import (
    COMPILE,
    FSDP2,
    SEQ_LEN,
    SIMPLE,
    TITAN_SIMPLE,
    TORCHTITAN,
    Length,
    Measured,
    Program,
    launch_8b,
    measured,
    torchtitan_refusal,
)
from pytest_aorta import DistributedWorld
from pytest_aorta.common.errors import AortaError

LENGTH = Length(warmup=5, steps=12)
SELECTIVE = {"activation_checkpointing": "selective"}
FUSED = SELECTIVE | {"backend": "inductor", "compile_loss": True}
TRACED = SELECTIVE | {"backend": "aot_eager", "compile_loss": True}
COMPILED = SELECTIVE | {"compile_blocks": True, "compile_loss": True}
TP2 = {"tensor_parallel_degree": 2}
BLOCK, AUTO = {"bucketing": "transformer_block"}, {"bucketing": "auto"}
VARIANTS = (
    Program("FSDP2 compile", FSDP2, COMPILED),
    Program("torchtitan FSDP2 compile", TORCHTITAN, options=COMPILE),
    Program("SimpleFSDP block inductor", SIMPLE, FUSED | BLOCK),
    Program("FSDP2 eager", FSDP2, SELECTIVE),
    Program("SimpleFSDP auto inductor", SIMPLE, FUSED | AUTO),
    Program("SimpleFSDP block aot_eager", SIMPLE, TRACED | BLOCK),
    Program("torchtitan FSDP2 eager", TORCHTITAN),
    Program("SimpleFSDP auto aot_eager", SIMPLE, TRACED | AUTO),
    Program("FSDP2 x TP=2 compile", FSDP2, COMPILED | TP2),
    Program("SimpleFSDP x TP=2 block inductor", SIMPLE, FUSED | BLOCK | TP2),
    Program("torchtitan SimpleFSDP block inductor", TORCHTITAN, options=TITAN_SIMPLE),
)
CHOSEN = [
    program
    for program in VARIANTS
    if any(part in program.name for part in os.environ.get("LLAMA_VARIANTS", "").split(","))
]


@dataclass
class Row:
    """The measurements of one variant, or the cause of its failure."""

    variant: str
    wall_s: float
    measured: Measured | None = None
    error: str = ""

    def line(self) -> str:
        """Return the row of the table."""
        if self.measured is None:
            cause = self.error.splitlines()[0][:300]
            return f"| {self.variant} | failed after {self.wall_s:.0f} s: {cause} | | | | | |"
        one = self.measured
        logged = "" if one.logged_tokens_per_s is None else f"{one.logged_tokens_per_s:,.0f}"
        loss = " to ".join(f"{value:.3f}" for value in (one.first_loss, one.last_loss) if value is not None)
        return (
            f"| {self.variant} | {one.tokens_per_s:,.0f} | {logged} | {one.step_p50_ms:.1f} | "
            f"{one.allocated_gib:.1f} | {one.reserved_gib:.1f} | {loss} |"
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


@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.launch_timeout(200)
@pytest.mark.parametrize("variant", CHOSEN, ids=lambda program: program.name)
def test_llama_8b(distributed_world: DistributedWorld, table: Table, variant: Program) -> None:
    """Print one row per variant."""
    table.platform = distributed_world.platform
    began_s = time.monotonic()
    if began_s - table.began_s > float(os.environ.get("LLAMA_BUDGET_S", "inf")):
        pytest.skip("LLAMA_BUDGET_S is over")
    if variant.workload == TORCHTITAN and (refusal := torchtitan_refusal()):
        pytest.skip(refusal)
    try:
        result = launch_8b(distributed_world, variant, 32, LENGTH)
    except AortaError as error:
        table.add(Row(variant.name, time.monotonic() - began_s, error=str(error)))
        pytest.fail(str(error), pytrace=False)
    table.environment = dict(result.environment)
    row = measured(result, SEQ_LEN / variant.config.get("tensor_parallel_degree", 1))
    table.add(Row(variant.name, time.monotonic() - began_s, row))
