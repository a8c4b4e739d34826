"""Estimated times of a graph's nodes, from shapes alone, so that every rank and every launch gets the same schedule.

Measured times would give each launch a schedule of its own, and torch's estimates need a device that torch knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..llama import flops  # noqa: F401 - registers the formulas that torch lacks

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
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
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

    return tree_map(shaped, node.meta.get("val"))


def _known(value: Any) -> Any:
    return 1 if isinstance(value, torch.SymInt) else value
