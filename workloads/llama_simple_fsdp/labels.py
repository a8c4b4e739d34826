"""Labels in the nodes of a traced graph: the parameter of each collective, and whether backward repeats a gather."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, ops
from torch.utils.checkpoint import CheckpointPolicy

# The key in a node's metadata, which survives the split into forward and backward.
POSITION = "aorta_parameter_position"
_ALL_GATHER = ops._c10d_functional.all_gather_into_tensor.default
_REDUCE_SCATTER = ops._c10d_functional.reduce_scatter_tensor.default
ALL_REDUCE = ops._c10d_functional.all_reduce.default
_WAIT = ops._c10d_functional.wait_tensor.default
# Regions of activation checkpointing count from 0, and torch keeps a node that a region with a higher number uses.
_AC_GRAPH_ID = 1 << 30


def collectives(graph: fx.Graph, groups: Collection[str]) -> list[fx.Node]:
    """Return the all-gathers, reduce-scatters and all-reduces of the groups named ``groups``, in the graph's order."""
    kinds = (_ALL_GATHER, _REDUCE_SCATTER, ALL_REDUCE)
    # The group's name is the last argument of each.
    return [node for node in graph.nodes if node.target in kinds and node.args[-1] in groups]


def label_gather(placeholder: fx.Node, position: int, reshard_after_forward: bool) -> None:
    """Label the all-gather of the parameter ``placeholder``, and mark its result to be kept or to be recomputed."""
    for node in _derived_alone(placeholder):
        if node.target is _ALL_GATHER:
            node.meta[POSITION] = position
        if reshard_after_forward:
            _set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif node.target is _WAIT:
            _set_policy(node, CheckpointPolicy.MUST_SAVE)


def label_reductions(gradient: fx.Node, position: int, *, is_sharded: bool, is_replicated: bool) -> None:
    """Label the collectives that make ``gradient``: a reduce-scatter over shards, then an all-reduce over replicas.

    Raises:
        RuntimeError: One of these collectives does not make the gradient.
    """
    expected = [target for target, is_made in ((ALL_REDUCE, is_replicated), (_REDUCE_SCATTER, is_sharded)) if is_made]
    node = gradient
    while expected:
        if node.target is expected[0]:
            node.meta[POSITION] = position
            del expected[0]
        elif len(node.all_input_nodes) != 1:
            kind = "all-reduce" if expected[0] is ALL_REDUCE else "reduce-scatter"
            raise RuntimeError(f"the gradient of parameter {position} is {gradient.name}, which no {kind} made")
        else:
            node = node.all_input_nodes[0]


def check_labels(graph: fx.Graph, positions: Collection[int], groups: Collection[str]) -> None:
    """Raise RuntimeError unless ``groups`` gather exactly the parameters at ``positions``."""
    labelled = {node.meta.get(POSITION) for node in collectives(graph, groups) if node.target is _ALL_GATHER}
    if labelled != set(positions):
        raise RuntimeError(f"the traced graph gathers parameters {labelled} of {set(positions)}")


def _derived_alone(placeholder: fx.Node) -> list[fx.Node]:
    """Return the nodes that depend only on the placeholder: casts, its all-gather, the wait, views, joined parts."""
    found, queue = {placeholder}, [placeholder]
    while queue:
        following = [
            user
            for user in queue.pop().users
            if user not in found and user.op != "output" and found.issuperset(user.all_input_nodes)
        ]
        found.update(following)
        queue += following
    return sorted(found - {placeholder})


def _set_policy(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AC_GRAPH_ID
