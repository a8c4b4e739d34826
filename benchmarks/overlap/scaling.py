"""Puts the scheduled step of Llama 3 8B under FSDP2 on 8 and on 64 ranks beside torchtitan's tokens per second.

    python -m benchmarks.overlap.scaling

Needs no GPU: both worlds are simulated, with one sequence of 8,192 tokens a rank and selective checkpointing. Printed
are the fall from 8 to 64 GPUs as published and as scheduled, and the bytes per second between hosts with which the
schedule would fall as far.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from pytest_aorta.cli.main import main as aorta
from pytest_aorta.result.folder import RANKS_FOLDER, RESULT_FILE
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.schedule import NOMINAL, play
from pytest_aorta.result.trace.step_graph import StepGraph

# Tokens per second and GPU on 8 and on 64 H100s, as the author of https://github.com/pytorch/torchtitan/pull/1881
# measured.
PUBLISHED = {"FSDP2": (7380, 5097), "SimpleFSDP": (7227, 4984)}
SIZES = (8, 64)
TOKENS = 8192
CONFIG = ("size=8b", "steps=1", "warmup=1", "profile_steps=0", "activation_checkpointing=selective")


def graphs(folder: Path) -> list[StepGraph]:
    """Return the step's graph of streams in a world of each size."""
    words = ["scale", "--sizes", ",".join(map(str, SIZES)), "--results", str(folder), "llama_fsdp2"]
    for assignment in CONFIG:
        words += ["--set", assignment]
    if aorta(words):
        raise SystemExit("aorta scale failed")
    results = [read_result(file) for file in folder.rglob(RESULT_FILE) if file.parent.parent.name != RANKS_FOLDER]
    found = {result.world_size: result.costs[0].graph for result in results if result.costs[0]}
    return [graph for size in SIZES if (graph := found.get(size))]


def fitting_bytes(graph: StepGraph, step_ms: float) -> float:
    """Return the bytes per second between hosts with which the schedule takes this time, by bisection."""
    low, high = 1e6, NOMINAL.network_bytes
    for _ in range(20):
        middle = (low * high) ** 0.5
        is_slower = play(graph, replace(NOMINAL, network_bytes=middle)).step_ms > step_ms
        low, high = (middle, high) if is_slower else (low, middle)
    return high


def main() -> None:
    """Print the schedules, and two lines for each published pair."""
    with tempfile.TemporaryDirectory(prefix="aorta-scaling-") as scratch:
        few, many = graphs(Path(scratch))
    first, second = play(few), play(many)
    print(f"scheduled: {first.step_ms / second.step_ms - 1:+.1%} tokens/s")
    for name, (before, after) in PUBLISHED.items():
        # What a step takes beyond its schedule is taken to be the same on any number of ranks.
        slower_ms = 1000 * TOKENS * (1 / after - 1 / before)
        fitting = fitting_bytes(many, first.step_ms + slower_ms) / 1e9
        print(
            f"{name}: published {before:,} -> {after:,} tokens/s ({after / before - 1:+.1%}), {slower_ms:.0f} ms a step"
        )
        print(f"  scheduled so with {fitting:.1f} GB/s a rank between hosts; nominal {NOMINAL.network_bytes / 1e9:.0f}")


if __name__ == "__main__":
    main()
