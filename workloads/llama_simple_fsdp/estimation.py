"""Estimated times of a graph's nodes, from shapes alone, so that every rank and every launch gets the same schedule.

Measured times would give each launch a schedule of its own. The built-in formulas of some versions of torch support
neither grouped-query attention nor CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

# Rounded values of an H200; a schedule depends only on their ratio.
_FLOPS_PER_MS = 6e11
_LINK_BYTES_PER_MS = 3e8
_LAUNCH_MS = 0.01
# Flash attention's backward does five matrix products for the forward's two.
_ATTENTION_BACKWARD = 2.5


def precomputed_ms(graph: fx.Graph) -> Callable[[fx.Node, int | None], float | None]:
    """Return a function that estimates the milliseconds of a node, optionally with another size in bytes.

    Nodes of ``graph`` as it is now are estimated at once; later nodes and other sizes are estimated when asked for.
    """
    known = {node: estimate_ms(node) for node in graph.nodes}

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        return known[node] if size_bytes is None and node in known else estimate_ms(node, size_bytes)

    return estimate


def estimate_ms(node: fx.Node, size_bytes: int | None = None) -> float | None:
    """Estimate the milliseconds of a collective, of ``size_bytes`` if given, or a matrix product; else return None.

    The estimate is the time of a kernel launch plus bytes, or floating-point operations, divided by an H200's rate.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        moved = max(map(_bytes, [node, *node.all_input_nodes])) if size_bytes is None else size_bytes
        return _LAUNCH_MS + moved / _LINK_BYTES_PER_MS
    if getattr(target, "overloadpacket", None) not in flop_registry:
        return None
    return _LAUNCH_MS + _flops(node) / _FLOPS_PER_MS


def _flops(node: fx.Node) -> float:
    operands = [value for value in map(_value, node.all_input_nodes) if value is not None]
    name = str(node.target)
    if "attention" in name:
        backward = "backward" in name
        # The first operand of backward is the output's gradient, which has the query's shape.
        query, key = (operands[1], operands[2]) if backward else (operands[0], operands[1])
        return 4.0 * query.numel() * key.shape[-2] * (_ATTENTION_BACKWARD if backward else 1)
    out = _value(node)
    # The last two operands are the matrices, which a bias may precede. A single operand is multiplied by itself.
    left = operands[-2:][0]
    return 0.0 if out is None else 2.0 * out.numel() * left.shape[-1]


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else _numel(value) * value.element_size()


def _numel(value: torch.Tensor) -> int:
    """Return the number of elements; a symbolic size, whose value only a step determines, counts as 1."""
    return math.prod(size if isinstance(size, int) else 1 for size in value.shape)


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
