"""Annotations of a traced graph: the parameter of each collective, and the gathers that backward repeats."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, ops
from torch.utils.checkpoint import CheckpointPolicy

from ..config import GraphSettings

# The names of the parameters that share a collective.
Bucket = tuple[str, ...]
# The key in a node's metadata, which survives the split into forward and backward.
POSITION = "aorta_parameter_position"
# The key of backward's nodes in the graph of a whole step, which can gather a parameter twice.
IS_BACKWARD = "aorta_is_backward"
ALL_GATHER = ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = ops._c10d_functional.reduce_scatter_tensor.default
ALL_REDUCE = ops._c10d_functional.all_reduce.default
WAIT = ops._c10d_functional.wait_tensor.default
# Regions of activation checkpointing count from 0, and torch keeps a node that a region with a higher number uses.
_AC_GRAPH_ID = 1 << 30


def collectives(graph: fx.Graph, groups: Collection[str]) -> list[fx.Node]:
    """Return the all-gathers, reduce-scatters and all-reduces of the groups named ``groups``, in the graph's order."""
    kinds = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
    # The group's name is the last argument of each.
    return [node for node in graph.nodes if node.target in kinds and node.args[-1] in groups]


def label_gather(placeholder: fx.Node, position: int, reshard_after_forward: bool) -> None:
    """Label the all-gather of the parameter ``placeholder``, and mark its result to be kept or to be recomputed."""
    for node in _derived_alone(placeholder):
        if node.target is ALL_GATHER:
            node.meta[POSITION] = position
        if reshard_after_forward:
            _set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif node.target is WAIT:
            _set_policy(node, CheckpointPolicy.MUST_SAVE)


def label_reductions(gradient: fx.Node, position: int, *, is_sharded: bool, is_replicated: bool) -> None:
    """Label the collectives that make ``gradient``: a reduce-scatter over shards, then an all-reduce over replicas.

    Raises:
        RuntimeError: One of these collectives does not make the gradient.
    """
    expected = [target for target, is_made in ((ALL_REDUCE, is_replicated), (REDUCE_SCATTER, is_sharded)) if is_made]
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
    labelled = {node.meta.get(POSITION) for node in collectives(graph, groups) if node.target is ALL_GATHER}
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


class CollectiveGroups(NamedTuple):
    """The names of the process groups that gather a parameter's shards and sum its gradient over replicas.

    None stands for a group of a single rank, which needs no collective.
    """

    shards: str | None
    replicas: str | None


# How torch writes an input of the traced graph, its gradient, or a part of either if they are DTensors.
_INPUT = re.compile(r"(?:__grad\()?args\[(\d+)\][.\w]*\)?[.\w]*")


@dataclass(frozen=True)
class Traced:
    """Facts on one model for the passes over its graphs; parameters are known by their position in registration order.

    Attributes:
        settings: the config keys of graphs.
        names: the names of all parameters.
        shards: the process group that gathers each parameter; without parameters that none gathers.
        replicas: the process group that sums each gradient over replicas; without those that none sums.
        inputs: for each input of the traced graph, the position of the parameter that it is, or None.
        buckets: the parameters of each bucket; without buckets, estimated times decide about reordering.
        fixed: the positions of the parameters whose collectives are not moved.
    """

    settings: GraphSettings
    names: tuple[str, ...] = ()
    shards: dict[int, str] = field(default_factory=dict)
    replicas: dict[int, str] = field(default_factory=dict)
    inputs: tuple[int | None, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    fixed: frozenset[int] = frozenset()

    def plan(self, group_of: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of the parameters in each bucket that have a group; a bucket is split by group."""
        number_of = {name: number for number, name in enumerate(self.names)}
        plan = []
        for bucket in self.buckets:
            by_group: dict[str, list[int]] = {}
            for number in sorted(number_of[name] for name in bucket):
                if number in group_of:
                    by_group.setdefault(group_of[number], []).append(number)
            plan += [tuple(numbers) for numbers in by_group.values()]
        return tuple(plan)

    def position(self, description: Any) -> int | None:
        """Return the position of a parameter, given the description of its input or gradient; else None."""
        found = None if description is None else _INPUT.fullmatch(description.expr())
        return self.inputs[int(found[1])] if found else None


def annotate(graph: fx.Graph, traced: Traced) -> None:
    """Label collectives in a graph of forward and backward, and mark gathers to be repeated."""
    shards, replicas = traced.shards, traced.replicas
    for placeholder in graph.find_nodes(op="placeholder"):
        position = traced.position(placeholder.meta.get("desc"))
        if position in shards:
            label_gather(placeholder, position, traced.settings.reshard_after_forward)
    check_labels(graph, shards, set(shards.values()))
    output = graph.output_node()
    for value, description in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        position = traced.position(description)
        # Placeholders among the outputs are meshes of DTensors that the graph passes through.
        if position is not None and isinstance(value, fx.Node) and value.op != "placeholder":
            label_reductions(value, position, is_sharded=position in shards, is_replicated=position in replicas)
