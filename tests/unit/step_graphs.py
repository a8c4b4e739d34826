"""Builds graphs of steps by hand."""

from functools import partial

from pytest_aorta.result.trace.step_graph import Node, StepGraph, Work

LAYERS = 6


def product(flops: int = 0, num_bytes: int = 0):
    return partial(_node, Work.COMPUTE, "aten::mm" if flops else "aten::add", 0, flops=flops, num_bytes=num_bytes)


def gather(num_bytes: int = 1 << 20, group_size: int = 2, name: str = "all_gather", stream: int = 1):
    return partial(_node, Work.COLLECTIVE, name, stream, num_bytes=num_bytes, group_size=group_size)


def _node(work, name, stream, after=(), **values) -> Node:
    return Node(work, name, stream, [*after], **values)


def fsdp_step(
    *, in_line: bool = False, gather_waits: bool = False, prefetches: bool = True, place: str = ""
) -> StepGraph:
    """Return a step of six layers: six gathers and products, and the same with reduce-scatters backwards.

    Args:
        in_line: Whether collectives are issued on the stream of compute.
        gather_waits: Whether the gathers of forward wait for all compute before them.
        prefetches: Whether backward gathers a layer before it computes the layer after it.
        place: Line that issued the collectives.
    """
    nodes: list[Node] = []
    last: dict[int, int] = {}

    def add(make, stream, of, *waits: int, **values) -> int:
        own = [last[stream]] if stream in last else []
        nodes.append(make(after=sorted({*own, *waits}), of=of, **values))
        last[stream] = len(nodes) - 1
        return last[stream]

    def compute(of: str, *waits: int) -> int:
        return add(product(flops=1 << 36), 0, of, *waits)

    gathers, reduces = (0, 0) if in_line else (1, 2)
    gathered: dict[str, int] = {}

    def unshard(layer: int, *waits: int) -> None:
        make = gather(num_bytes=1 << 24, group_size=8, stream=gathers)
        gathered[f"layers.{layer}"] = add(make, gathers, f"layers.{layer}", *waits, place=place)

    done = [-1]
    for layer in range(LAYERS):
        waits = [last[0]] if gather_waits and 0 in last else [done[-2]] if len(done) > 2 else []
        unshard(layer, *waits)
        done.append(compute(f"layers.{layer}", gathered[f"layers.{layer}"]))
    for layer in reversed(range(LAYERS)):
        if layer == LAYERS - 1:
            unshard(layer, done[-1])
        if prefetches and layer:
            unshard(layer - 1, done[-1])
        done.append(compute(f"layers.{layer}", gathered[f"layers.{layer}"]))
        make = gather(num_bytes=1 << 24, group_size=8, name="reduce_scatter", stream=reduces)
        add(make, reduces, f"layers.{layer}", done[-1], place=place)
        if not prefetches and layer:
            unshard(layer - 1, done[-1])
    names = ["compute", "all-gather", "reduce-scatter"]
    return StepGraph(names[: max(node.stream for node in nodes) + 1], nodes)
