"""The order of collectives and compute in a graph."""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils.flop_counter import flop_registry

from ..models import flops  # noqa: F401 - registers the formulas that torch lacks
from . import torch_private
from .annotate import WAIT, Traced

# The key in the metadata of a node that starts the collective of a bucket: the positions of its parameters.
BUCKET = "aorta_bucket"
# Nodes with those that have to precede them.
Dependencies: TypeAlias = dict[fx.Node, list[fx.Node]]


def reorder_collectives(graph: fx.Graph, traced: Traced) -> None:
    """Start each bucket's gather before the wait for the one before, and wait for its reduction after the next starts.

    Collectives that are in no bucket are ordered by estimated times, which may merge them.
    """
    if not traced.settings.overlap_reorder:
        return
    # Without explicit dependencies, inductor reorders nodes again.
    insert_overlap_deps = traced.settings.backend == "inductor"
    if not any(map(traced.plan, (traced.shards, traced.replicas))):
        assert graph.owning_module is not None
        schedule_by_time(graph.owning_module, traced.settings.bucketing == "auto", insert_overlap_deps)
        return
    starts = [node for node in graph.nodes if BUCKET in node.meta]
    gathers = [node for node in starts if "all_gather" in str(node.target)]
    reductions = [node for node in starts if node not in gathers]
    fixed = {node for node in starts if traced.fixed.issuperset(node.meta[BUCKET])}
    later = _start_gathers_early(graph, gathers, fixed) | _wait_for_reductions_late(reductions, fixed)
    graph.lint()
    if insert_overlap_deps and later:
        torch_private.preserve_node_ordering(graph, later)  # type: ignore[arg-type]


def _wait_of(start: fx.Node) -> fx.Node:
    return next(node for node in start.users if node.target is WAIT)


def _start_gathers_early(graph: fx.Graph, starts: Sequence[fx.Node], fixed: Collection[fx.Node]) -> Dependencies:
    """Move each gather before the wait for the gather before it, or the first before all compute."""
    first_compute = next((node for node in graph.nodes if torch_private.is_compute_node(node)), None)
    later: Dependencies = {}
    for start, target in zip(starts, [first_compute, *map(_wait_of, starts)], strict=False):
        if target is None or start in fixed or start < target:
            continue
        for node in needed(start):
            if target < node:
                target.prepend(node)
        later[target] = [start]
    return later


def _wait_for_reductions_late(starts: Sequence[fx.Node], fixed: Collection[fx.Node]) -> Dependencies:
    """Move the wait for each reduction behind the start of the next one of its kind, of those that are moved."""
    later: Dependencies = {}
    for kind in dict.fromkeys(node.target for node in starts):
        for start, following in pairwise(node for node in starts if node.target is kind and node not in fixed):
            wait = _wait_of(start)
            move_behind(derived(wait), following)
            later[wait] = [following]
    return later


def needed(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and the nodes that it needs, without placeholders, in the graph's order."""
    return _reached(node, lambda reached: reached.all_input_nodes, "placeholder")


def derived(wait: fx.Node) -> list[fx.Node]:
    """Return ``wait`` and the nodes that need its value, without the graph's output, in the graph's order."""
    return _reached(wait, lambda reached: reached.users, "output")


def _reached(node: fx.Node, next_of: Callable[[fx.Node], Iterable[fx.Node]], end: str) -> list[fx.Node]:
    """Return ``node`` and what ``next_of`` leads to, without nodes whose operation is ``end``, in the graph's order."""
    found, queue = {node}, [node]
    while queue:
        new = [other for other in next_of(queue.pop()) if other not in found and other.op != end]
        found.update(new)
        queue += new
    return sorted(found)


def move_behind(nodes: Sequence[fx.Node], place: fx.Node) -> None:
    """Move those of ``nodes`` that precede ``place`` behind it, in the same order."""
    for node in nodes:
        if node < place:
            place.append(node)
            place = node


class _WithoutFormulas(torch_private.OverlapScheduler):
    """A scheduler that never calls torch's own formulas for run times.

    Those formulas fail on a CPU, because they lack its memory bandwidth, and up to torch 2.12 on grouped-query
    attention. Torch 2.13 evaluates them even for nodes of ``custom_runtime_estimation`` and with ``compute_estimator``
    ``analytical``, so ``schedule_overlap_bucketing`` can't be called in place of this class.
    """

    def __init__(self, graph_module: fx.GraphModule, *args: Any, **options: Any) -> None:
        # Torch applies no formula to a node without a value. The values are restored before any other use.
        compute_nodes = filter(torch_private.is_compute_node, graph_module.graph.nodes)
        self._values = {node: node.meta.pop("val") for node in compute_nodes if "val" in node.meta}
        try:
            super().__init__(graph_module, *args, **options)
        finally:
            self._restore()

    def _collect_node_ancestors(self) -> Any:
        self._restore()
        return super()._collect_node_ancestors()

    def get_non_collective_runtime_estimate(self, node: fx.Node) -> float | None:
        """Return the given estimate, as 2.13 does; torch 2.11 would prefer measured times that it keeps on disk."""
        estimate = self.custom_runtime_estimation
        return None if estimate is None else estimate(node, None)

    def _handle_wait(self, node: fx.Node) -> None:
        """Schedule a further wait for a collective that was waited for; goes with torch 2.11, which asserts."""
        if self.wait_to_start[node] in self.in_flight:
            super()._handle_wait(node)
        else:
            self._schedule(node)

    def _restore(self) -> None:
        while self._values:
            node, value = self._values.popitem()
            node.meta["val"] = value

    def _align_compute_nodes_runtime_estimations_across_all_distributed_ranks(self) -> None:
        """Do nothing: estimates from shapes alone are the same on all ranks."""


def schedule_by_time(graph_module: fx.GraphModule, bucketing: bool, insert_overlap_deps: bool) -> None:
    """Overlap collectives with compute by estimated times; also merge collectives if ``bucketing``."""
    known = inspect.signature(torch_private.schedule_overlap_bucketing).parameters
    if bucketing and "pre_bucketing_fsdp_collectives" in known:
        # Torch's own scheduler has had this step since 2.13.
        torch_private.pre_bucket(graph_module)
    taken = inspect.signature(torch_private.OverlapScheduler).parameters
    options = {name: known[name].default for name in known if name in taken and name != "gm"} | {
        "collective_bucketing": bucketing,
        "insert_overlap_deps": insert_overlap_deps,
        "custom_runtime_estimation": precomputed_ms(graph_module.graph),
    }
    _WithoutFormulas(graph_module, **options).run()
    graph_module.recompile()


# Rounded values of an H200; a schedule depends only on their ratio.
_FLOPS_PER_MS = 6e11
_LINK_BYTES_PER_MS = 3e8
_LAUNCH_MS = 0.01


def precomputed_ms(graph: fx.Graph) -> Callable[[fx.Node, int | None], float | None]:
    """Return a function that estimates the milliseconds of a node, optionally with another size in bytes.

    Nodes of ``graph`` as it is now are estimated at once; later nodes and other sizes are estimated when asked for.
    """
    known = {node: estimate_ms(node) for node in graph.nodes}

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        return known[node] if size_bytes is None and node in known else estimate_ms(node, size_bytes)

    return estimate


def estimate_ms(node: fx.Node, size_bytes: int | None = None) -> float | None:
    """Estimate the milliseconds of a collective, of ``size_bytes`` if given, or of products; else return None.

    The estimate is the time of a kernel launch plus bytes, or floating-point operations, divided by an H200's rate.
    """
    target = node.target
    if isinstance(target, torch_private.OpOverload) and target.namespace == "_c10d_functional":
        moved = max(map(_bytes, [node, *node.all_input_nodes])) if size_bytes is None else size_bytes
        return _LAUNCH_MS + moved / _LINK_BYTES_PER_MS
    count = flop_registry.get(getattr(target, "overloadpacket", target))
    if count is None:
        return None
    arguments, keywords = map_arg((node.args, node.kwargs), _shaped)
    num_flops: int = count(*arguments, **keywords, out_val=_shaped(node))
    return _LAUNCH_MS + num_flops / _FLOPS_PER_MS


def _bytes(node: fx.Node) -> int:
    value = _shaped(node)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _shaped(node: fx.Node) -> Any:
    """Return the node's value without data; a symbolic size, whose value only a step determines, counts as 1."""

    def shaped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty([_known(size) for size in value.shape], dtype=value.dtype, device="meta")
        return _known(value)

    return map_aggregate(node.meta.get("val"), shaped)


def _known(value: Any) -> Any:
    return 1 if isinstance(value, torch.SymInt) else value
