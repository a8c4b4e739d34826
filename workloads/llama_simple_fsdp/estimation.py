"""How long a node of a graph takes, from its shapes alone: every rank and every launch gets the same schedule.

Measuring instead would schedule each launch its own way, and the built-in formulas of some versions of torch know
neither grouped-query attention nor the memory of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

# An H200's, rounded: only their ratio matters to a schedule.
_FLOPS_PER_MS = 6e11
_LINK_BYTES_PER_MS = 3e8
_LAUNCH_MS = 0.01
# Flash attention's backward does five matrix products for the forward's two.
_ATTENTION_BACKWARD = 2.5


def precomputed_ms(graph: fx.Graph) -> Callable[[fx.Node, int | None], float | None]:
    """The estimates of the graph as it is now; of nodes that come later, and of other sizes, those of their time."""
    known = {node: estimate_ms(node) for node in graph.nodes}

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        return known[node] if size_bytes is None and node in known else estimate_ms(node, size_bytes)

    return estimate


def estimate_ms(node: fx.Node, size_bytes: int | None = None) -> float | None:
    """The time of a collective (of ``size_bytes``, where given) or of a matrix product; None for all else."""
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
        # Backward is given the output's gradient first, which has the query's shape.
        query, key = (operands[1], operands[2]) if backward else (operands[0], operands[1])
        return 4.0 * query.numel() * key.shape[-2] * (_ATTENTION_BACKWARD if backward else 1)
    out = _value(node)
    # The last two operands are the matrices: before them a bias may stand. One alone is multiplied by itself.
    left = operands[-2:][0]
    return 0.0 if out is None else 2.0 * out.numel() * left.shape[-1]


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else math.prod(value.shape) * value.element_size()


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
