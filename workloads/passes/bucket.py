"""Buckets: the collectives of several parameters merged into one."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import fx

from .annotate import ALL_GATHER, ALL_REDUCE, IS_BACKWARD, POSITION, REDUCE_SCATTER, WAIT, Traced, collectives
from .reorder import BUCKET, derived, move_behind, needed
from .torch_private import merge_all_gather_bucket, merge_all_reduce_bucket, merge_reduce_scatter_bucket

_MERGE_REDUCTIONS: dict[Any, Any] = {REDUCE_SCATTER: merge_reduce_scatter_bucket, ALL_REDUCE: merge_all_reduce_bucket}


def bucket_collectives(graph: fx.Graph, traced: Traced) -> None:
    """Merge the collectives of each bucket's parameters, by kind, in the order of the model or of the graph.

    Raises:
        RuntimeError: A collective belongs to no known parameter, or its parameter to no bucket.
    """
    kinds = {(ALL_GATHER, REDUCE_SCATTER): traced.shards, (ALL_REDUCE,): traced.replicas}
    if not any(traced.plan(group_of) for group_of in kinds.values()):
        return
    groups = {group for group_of in kinds.values() for group in group_of.values()}
    nodes = collectives(graph, groups)
    if unlabelled := [node.name for node in nodes if POSITION not in node.meta]:
        raise RuntimeError(f"collectives {unlabelled} belong to no known parameter")
    by_parameter: dict[tuple[Any, int, bool], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        by_parameter[node.target, node.meta[POSITION], node.meta.get(IS_BACKWARD, False)].append(node)
    # The order of members is that of parameters in the bucket's payload.
    in_order = list if traced.settings.bucket_order == "registration" else sorted
    for targets, group_of in kinds.items():
        for is_later, bucket, target in product((False, True), traced.plan(group_of), targets):
            if members := [node for position in bucket for node in by_parameter[target, position, is_later]]:
                _merge(graph, in_order(members), bucket)
    graph.lint()
    if left := sorted({node.meta[POSITION] for node in collectives(graph, groups) if POSITION in node.meta}):
        raise RuntimeError(f"the collectives of {[traced.names[number] for number in left]} were not bucketed")


def _merge(graph: fx.Graph, members: list[fx.Node], bucket: Sequence[int]) -> None:
    """Merge collectives of one kind, and write the bucket into the node that starts the merged one."""
    waits = [next(iter(node.users)) for node in members]
    if members[0].target is ALL_GATHER:
        first = min(members)
        # Torch sorts the inputs of a merged gather since 2.13.
        for member in members:
            for node in needed(member)[:-1]:
                if first < node:
                    first.prepend(node)
        new_nodes, _ = merge_all_gather_bucket(
            graph, members, mode="custom_ops", insert_before=first.next, wait_insertion_point=min(waits)
        )
    else:
        last = max(members)
        # Views and casts of the first gradients precede the last reduction.
        for wait in waits:
            move_behind(derived(wait), last)
        new_nodes, _ = _MERGE_REDUCTIONS[members[0].target](graph, members, insert_before=last.next)
    wait = next(node for node in reversed(new_nodes) if node.target is WAIT)
    # Torch 2.11 ignores the place at which a merged gather has to start.
    for node in new_nodes[: new_nodes.index(wait)]:
        if wait < node:
            wait.prepend(node)
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    start.meta[BUCKET] = tuple(bucket)
