"""Puts the scheduled step of Llama 3 8B on 8 and on 64 ranks beside torchtitan's published tokens per second.

    python -m benchmarks.overlap.scaling [--keep FOLDER]

Both worlds are simulated, one rank each, without a GPU. Printed are the fall of tokens per second from 8 to 64 GPUs as
published and as scheduled, and the bytes per second between hosts at which the schedule would fall as far. Published:
batches of one sequence of 8,192 tokens on H100s, aot_eager (SimpleFSDP) and eager (FSDP2).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from pytest_aorta.cli.main import main as aorta
from pytest_aorta.common.files import files_below
from pytest_aorta.result.folder import RESULT_FILE, is_rank_file
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.schedule import NOMINAL, play
from pytest_aorta.result.trace.step_graph import StepGraph

SIZES = (8, 64)
# Tokens per second and GPU on these numbers of GPUs (https://github.com/pytorch/torchtitan/pull/1881).
PUBLISHED = {"llama_fsdp2": (7380, 5097), "llama_simple_fsdp": (7227, 4984)}
CONFIG = ("size=8b", "steps=1", "warmup=1", "profile_steps=0", "activation_checkpointing=selective")


def graphs(workload: str, folder: Path) -> list[StepGraph]:
    """Return the step's graph of streams of a workload in a world of each size."""
    words = ["scale", "--sizes", ",".join(map(str, SIZES)), "--results", str(folder), workload]
    for assignment in CONFIG:
        words += ["--set", assignment]
    if aorta(words):
        raise SystemExit(f"{workload}: aorta scale failed")
    results = [read_result(file) for file in files_below(folder, RESULT_FILE) if not is_rank_file(file)]
    found = {result.world_size: result.costs[0].graph for result in results if result.costs[0]}
    return [graph for size in SIZES if (graph := found.get(size))]


def fitting_bytes(graph: StepGraph, step_ms: float) -> float:
    """Return the bytes per second between hosts with which the schedule takes this time, by bisection."""
    low, high = 1e6, NOMINAL.network_bytes
    for _ in range(40):
        middle = (low * high) ** 0.5
        is_slower = play(graph, replace(NOMINAL, network_bytes=middle)).step_ms > step_ms
        low, high = (middle, high) if is_slower else (low, middle)
    return high


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aorta-scaling-") as scratch:
        for workload, (few, many) in PUBLISHED.items():
            on_host, between = graphs(workload, (given.keep or Path(scratch)).absolute() / workload)
            first, second = play(on_host), play(between)
            fitting = fitting_bytes(between, first.step_ms * few / many)
            fall, scheduled = many / few - 1, first.step_ms / second.step_ms - 1
            print(f"{workload}: published {few:,} -> {many:,} tokens/s ({fall:+.1%})")
            print(f"  scheduled {first.step_ms:,.0f} -> {second.step_ms:,.0f} ms ({scheduled:+.1%})")
            print(f"  exposed {first.exposed_ms:,.1f} -> {second.exposed_ms:,.1f} ms")
            nominal = f"{NOMINAL.network_bytes / 1e9:.0f}"
            print(f"  falls as far with {fitting / 1e9:.1f} GB/s a rank between hosts, nominal are {nominal}")


if __name__ == "__main__":
    main()
