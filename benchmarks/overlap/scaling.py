"""Puts the scheduled step of Llama 3 8B under FSDP2 on 8 and on 64 ranks beside torchtitan's tokens per second.

    python -m benchmarks.overlap.scaling

Needs no GPU. The graph is built from the dimensions of the model: for each block an all-gather in forward and one in
backward (bfloat16), one block ahead of compute, and a reduce-scatter (float32) on a stream of its own; compute is
matrix products and attention, with half of forward again in backward (selective checkpointing). Printed are the fall
from 8 to 64 GPUs as published and as scheduled, and the bytes per second between hosts with which the schedule would
fall as far.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_aorta.result.trace.schedule import NOMINAL, play
from pytest_aorta.result.trace.step_graph import Node, StepGraph, Work

# Tokens per second and GPU on 8 and on 64 H100s, one sequence of 8,192 tokens a GPU, as the author of
# https://github.com/pytorch/torchtitan/pull/1881 measured.
PUBLISHED = {"FSDP2": (7380, 5097), "SimpleFSDP": (7227, 4984)}
SIZES = (8, 64)
TOKENS, DIM, LAYERS, KEYS, HIDDEN, VOCABULARY = 8192, 4096, 32, 1024, 14336, 128256
BLOCK = 2 * DIM * (DIM + KEYS) + 3 * DIM * HIDDEN
# The units that FSDP2 gathers, in the order of forward: parameters, and operations in forward.
UNITS = [
    (VOCABULARY * DIM, 0),
    *[(BLOCK, 2 * TOKENS * (BLOCK + TOKENS * DIM))] * LAYERS,
    (VOCABULARY * DIM, 2 * TOKENS * VOCABULARY * DIM),
]
AGAIN = 0.5


def step(size: int) -> StepGraph:
    """Return the graph of a step on one of ``size`` ranks."""
    nodes: list[Node] = []
    last: dict[int, int] = {}

    def add(work: Work, name: str, stream: int, *after: int, **values: int) -> int:
        earlier = [last[stream]] if stream in last else []
        nodes.append(Node(work, name, stream, sorted({*earlier, *after}), **values))
        last[stream] = len(nodes) - 1
        return last[stream]

    def gather(parameters: int, *after: int) -> int:
        return add(Work.COLLECTIVE, "all_gather", 1, *after, num_bytes=2 * parameters, group_size=size)

    for is_backward in (False, True):
        units = UNITS[::-1] if is_backward else UNITS
        start = [last[0]] if is_backward else []
        gathered = [gather(units[0][0], *start)]
        computed = start
        for place, (parameters, flops) in enumerate(units):
            if place + 1 < len(units):
                gathered.append(gather(units[place + 1][0], *computed))
            times = 2 + AGAIN if is_backward else 1
            computed = [add(Work.COMPUTE, "aten::mm", 0, gathered[place], flops=round(times * flops))]
            if is_backward:
                size_bytes = 4 * parameters
                add(Work.COLLECTIVE, "reduce_scatter", 2, *computed, num_bytes=size_bytes, group_size=size)
    return StepGraph(["compute", "all-gather", "reduce-scatter"], nodes)


def fitting_bytes(graph: StepGraph, step_ms: float) -> float:
    """Return the bytes per second between hosts with which the schedule takes this time, by bisection."""
    low, high = 1e6, NOMINAL.network_bytes
    for _ in range(40):
        middle = (low * high) ** 0.5
        is_slower = play(graph, replace(NOMINAL, network_bytes=middle)).step_ms > step_ms
        low, high = (middle, high) if is_slower else (low, middle)
    return high


def main() -> None:
    """Print the schedules, and two lines for each published pair."""
    few, many = map(step, SIZES)
    first, second = play(few), play(many)
    for size, found in zip(SIZES, (first, second), strict=True):
        exposed = f"exposed {found.exposed_ms:.1f} ms, overlap {found.overlap_ratio:.3f}"
        print(f"{size} ranks: {found.step_ms:,.0f} ms, {exposed}")
    print(f"scheduled: {first.step_ms / second.step_ms - 1:+.1%} tokens/s")
    for name, (before, after) in PUBLISHED.items():
        # What compute takes beyond the products of the graph is the same on any number of ranks.
        slower_ms = 1000 * TOKENS * (1 / after - 1 / before)
        fitting = fitting_bytes(many, first.step_ms + slower_ms) / 1e9
        print(
            f"{name}: published {before:,} -> {after:,} tokens/s ({after / before - 1:+.1%}), {slower_ms:.0f} ms a step"
        )
        print(f"  scheduled so with {fitting:.1f} GB/s a rank between hosts; nominal {NOMINAL.network_bytes / 1e9:.0f}")


if __name__ == "__main__":
    main()
