"""Torch's division of a joint graph into forward and backward, with the saved values in the order that torch reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx

from ..common.torch_private import CustomPartitionerFn


class Partitioner(CustomPartitionerFn):
    """Torch's partitioner, followed by a sort of the saved values into the order that torch reads."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide a joint graph into forward and backward."""
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        order_saved(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        """Return the key of this partitioner in torch's caches of compiled graphs."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def order_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Move saved values that are neither tensors nor symbols (meshes of DTensors) behind all saved tensors.

    Torch reads the saved values by their position. From torch 2.13 on, if an operator that can be random is computed
    again, e.g. attention with dropout, the partitioner adds states of random generators after the meshes.
    """
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    order = [
        *range(num_outputs),
        *sorted(range(num_outputs, len(values)), key=lambda number: saved_order(values[number])),
    ]
    output.args = (tuple(values[number] for number in order),)
    if (descriptions := output.meta.get("desc")) is not None:
        output.meta["desc"] = [descriptions[number] for number in order]
    inputs = backward.graph.find_nodes(op="placeholder")
    number = next(number for number, node in enumerate(inputs) if node.name.startswith("tangents"))
    # On CUDA, torch gives backward a generator for each state, behind the tangents.
    for node in inputs[:number]:
        if saved_order(node) == MESHES:
            inputs[number].prepend(node)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


TENSORS, MESHES, SYMBOLS = range(3)


def saved_order(node: fx.Node) -> int:
    """Return the sort key of a value that is saved for backward: tensors, then meshes, then symbols."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return TENSORS
    return SYMBOLS if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat) else MESHES
