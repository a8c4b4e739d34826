"""Torch's division of a joint graph into forward and backward, and the two joined into one graph of a whole step.

The graph of a step has forward, loss and the gradients of all parameters.

Torch divides a joint graph into forward and backward, which also decides what backward computes and gathers again. Here
the two are joined again, with 1 as the gradient of the loss, so that passes see the whole. In place of backward, a
graph without operators hands the gradients to autograd.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx

from ..common.torch_private import CustomPartitionerFn, get_hash_for_files
from .annotate import IS_BACKWARD

# Forward and backward.
Graphs: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]


class Partitioner(CustomPartitionerFn):
    """Torch's partitioner, followed by a sort of the saved values into the order that torch reads."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Divide a joint graph into forward and backward."""
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        order_saved(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        """Return the key of this partitioner in torch's caches of compiled graphs."""
        return get_hash_for_files((__file__,), type(self).__name__)


def order_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Move saved values that are neither tensors nor symbols (meshes of DTensors) behind all saved tensors.

    Torch reads the saved values by their position. From torch 2.13 on, if an operator that can be random is computed
    again, e.g. attention with dropout, the partitioner adds states of random generators after the meshes.
    """
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    order = sorted(range(len(values)), key=lambda number: -1 if number < num_outputs else saved_order(values[number]))
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


class StepPartitioner(Partitioner):
    """Torch's partitioner, followed by a join of its two graphs."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Return a graph of the whole step, and a graph that returns the gradients that it is given."""
        forward, backward = super().__call__(gm, joint_inputs, **kwargs)
        return join(gm, forward, backward, kwargs["num_fwd_outputs"])


def join(joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> Graphs:
    """Return the two graphs of :class:`StepPartitioner`; ``forward`` has ``num_outputs`` outputs besides saved values.

    Raises:
        RuntimeError: The model returns more than a loss, or backward needs a value that forward does not save.
    """
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    values: Any = graph.graph_copy(forward.graph, copies)
    inputs = backward.graph.find_nodes(op="placeholder")
    tangents = [number for number, node in enumerate(inputs) if node.name.startswith("tangents")]
    if len(tangents) != 1:
        raise RuntimeError(f"trace is step: a step has one loss, and {len(tangents)} outputs have gradients")
    copies |= zip(inputs[: tangents[0]], _as_inputs(values[num_outputs:]), strict=True)
    copies[inputs[tangents[0]]] = _ones(graph, inputs[tangents[0]])
    for node in backward.graph.nodes:
        if node.op not in ("placeholder", "output"):
            if unknown := [given.name for given in node.all_input_nodes if given not in copies]:
                raise RuntimeError(
                    f"trace is step: backward computes {node.name} with {unknown}, states of the random generator; "
                    f"recompute no attention kernel that can be random: use activation_checkpointing selective, or "
                    f"attention flex"
                )
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta[IS_BACKWARD] = True
    gradients: Any = backward.graph.output_node().args[0]
    distinct = sorted({copies[node]: None for node in gradients if node is not None}, key=saved_order)
    graph.output((*values[:num_outputs], *distinct))
    return _module(joint, graph), _module(joint, _handed_over(inputs[tangents[0] :], gradients, copies, distinct))


def _ones(graph: fx.Graph, tangent: fx.Node) -> fx.Node:
    """Add the gradient of the loss to ``graph``."""
    value = tangent.meta["val"]
    node = graph.call_function(
        torch.ops.aten.full.default, (list(value.shape), 1), {"dtype": value.dtype, "device": value.device}
    )
    node.meta = {"val": value, IS_BACKWARD: True}
    return node


def _handed_over(
    inputs: Sequence[fx.Node],
    gradients: Sequence[fx.Node | None],
    copies: dict[fx.Node, Any],
    distinct: Sequence[fx.Node],
) -> fx.Graph:
    """Return a graph that takes the ``distinct`` gradients of a joined graph and ``inputs``, and returns gradients."""
    graph = fx.Graph()
    given: dict[fx.Node, fx.Node] = {}
    for node in [*_as_inputs(distinct), *inputs]:
        given[node] = graph.placeholder(node.name)
        given[node].meta = dict(node.meta)
    graph.output(tuple(None if node is None else given[copies[node]] for node in gradients))
    return graph


def _as_inputs(saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Return saved values in the order in which backward takes them: symbols, which forward returns last, are first."""
    return sorted(saved, key=lambda node: saved_order(node) != SYMBOLS)


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(root, graph)
