"""Buckets of collectives: those of several parameters merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.bucketing import merge_all_reduce_bucket
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.fx_passes.overlap_manual_scheduling import ManualOverlapScheduler
from torch.utils._ordered_set import OrderedSet

from ..config import GraphSettings
from .annotate import (
    ALL_REDUCE,
    IS_BACKWARD,
    POSITION,
    Bucket,
    GroupedParameters,
    _uuid,
    collectives,
)
from .reorder import _derived, _move_behind, _schedule, _WithoutFormulas


@dataclass(frozen=True)
class CollectivesPass(CustomGraphPass):
    """A pass over the forward or the backward graph that merges collectives into buckets and moves them.

    Attributes:
        buckets: the parameters of each bucket. If no collective belongs to one, estimated times decide about
            reordering.
        fixed: the positions of the parameters whose collectives are not moved.
    """

    settings: GraphSettings
    parameters: GroupedParameters
    buckets: tuple[Bucket, ...]
    fixed: frozenset[int]

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        if not self.settings.has_graph_pass:
            return
        graph_module = graph.owning_module
        if graph_module is None:
            raise RuntimeError("the graph to bucket belongs to no module")
        # Without explicit dependencies, inductor reorders nodes again.
        insert_overlap_deps = self.settings.backend == "inductor"
        shards, replicas = self.parameters.shards, self.parameters.replicas
        plan, reductions = self.parameters.plan(self.buckets, shards), self.parameters.plan(self.buckets, replicas)
        if plan or reductions:
            groups = frozenset({*shards.values(), *replicas.values()})
            if unlabelled := [node.name for node in collectives(graph, groups) if POSITION not in node.meta]:
                raise RuntimeError(f"collectives {unlabelled} belong to no known parameter")
            if plan:
                _PlannedScheduler(
                    graph_module, self.settings, plan, frozenset(shards.values()), insert_overlap_deps, self.fixed
                ).run()
            self._bucket_all_reduces(graph, reductions, insert_overlap_deps)
            graph_module.recompile()
            self._check_bucketed(collectives(graph, groups))
        elif self.settings.overlap_reorder:
            _schedule(graph_module, self.settings.bucketing == "auto", insert_overlap_deps)

    def uuid(self) -> Any:
        """Return the key of this pass in torch's caches of compiled graphs."""
        return _uuid(self)

    def _bucket_all_reduces(self, graph: fx.Graph, plan: Sequence[tuple[int, ...]], insert_overlap_deps: bool) -> None:
        """Merge the all-reduces of each bucket, and wait for one after the start of the next, as FSDP2 does."""
        nodes_of_groups = collectives(graph, set(self.parameters.replicas.values()))
        by_position = {node.meta[POSITION]: node for node in nodes_of_groups if node.target is ALL_REDUCE}
        order = {node: number for number, node in enumerate(graph.nodes)}
        merged: list[tuple[fx.Node, bool]] = []
        for bucket in plan:
            nodes = [by_position[number] for number in bucket if number in by_position]
            if not nodes:
                continue
            if self.settings.bucket_order != "registration":
                nodes.sort(key=order.__getitem__)
            last = max(nodes, key=order.__getitem__)
            # Views and casts of the first gradients precede the last all-reduce.
            for node in nodes:
                _move_behind(_derived(next(iter(node.users))), last)
            new_nodes, _ = merge_all_reduce_bucket(graph, nodes, insert_before=last.next)
            start = next(node for node in new_nodes if node.target is ALL_REDUCE)
            merged.append((start, self.fixed.issuperset(bucket)))
        self._delay_waits(graph, merged, insert_overlap_deps)
        graph.lint()

    def _delay_waits(self, graph: fx.Graph, merged: Sequence[tuple[fx.Node, bool]], insert_overlap_deps: bool) -> None:
        if not self.settings.overlap_reorder:
            return
        order = {node: number for number, node in enumerate(graph.nodes)}
        starts = sorted(merged, key=lambda found: order[found[0]])
        later: dict[fx.Node, OrderedSet[fx.Node]] = {}
        for (start, is_fixed), (following, _) in pairwise(starts):
            if not is_fixed:
                wait = next(iter(start.users))
                _move_behind(_derived(wait), following)
                later[wait] = OrderedSet([following])
        if insert_overlap_deps and later:
            preserve_node_ordering(graph, later)

    def _check_bucketed(self, nodes: Sequence[fx.Node]) -> None:
        left = {node.meta[POSITION] for node in nodes if POSITION in node.meta}
        if left:
            names = [self.parameters.names[number] for number in sorted(left)]
            raise RuntimeError(f"the collectives of {names} were not bucketed")


_MOVED = ("bucketed_all_gather", "bucketed_reduce_scatter_wait")


class _PlannedScheduler(_WithoutFormulas, ManualOverlapScheduler):
    """A scheduler of buckets that list parameters; torch's own scheduler takes modules, in the graph's order only."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        settings: GraphSettings,
        plan: tuple[tuple[int, ...], ...],
        groups: frozenset[str],
        insert_overlap_deps: bool,
        fixed: frozenset[int],
    ) -> None:
        super().__init__(graph_module, [], insert_overlap_deps)
        self._settings, self._plan, self._groups, self._fixed = settings, plan, groups, fixed

    def run(self) -> fx.GraphModule:
        if self._settings.overlap_reorder:
            if self._fixed:
                self._bucket_in_place()
            super().run()
        else:
            self._manual_bucket_collectives()
        return self.gm

    def _bucket_in_place(self) -> None:
        """Merge the collectives of fixed parameters, and remove the marks that would make torch move them.

        Torch starts a gather before the wait for the preceding gather, even if that gather is in place. Torch waits for
        a reduction after the start of the next reduction that is not in place.
        """
        plan = self._plan
        self._plan = tuple(bucket for bucket in plan if self._fixed.issuperset(bucket))
        self._manual_bucket_collectives()
        marks = getattr(self.bucketer, "bucketed_node_types", None)
        marked = 0
        for node in self.graph.nodes:
            # Torch 2.11 writes the marks into the nodes.
            holder, key = (node.meta, "manual_bucket_node_type") if marks is None else (marks, node)
            marked += key in holder
            if holder.get(key) in _MOVED:
                del holder[key]
        if any(self.nodes_in_subgraph) and not marked:
            raise RuntimeError(
                f"overlap_reorder_modules does not support torch {torch.__version__}, whose scheduler marks no buckets"
            )
        self._plan = tuple(bucket for bucket in plan if not self._fixed.issuperset(bucket))

    def _obtain_nodes_in_subgraph(self) -> None:
        # A merged reduction has no position.
        nodes = [node for node in collectives(self.graph, self._groups) if POSITION in node.meta]
        if self._settings.bucket_order == "registration":
            nodes.sort(key=lambda node: node.meta[POSITION])
        # This list determines the order of parameters in a bucket's payload.
        self.nodes_in_subgraph = [
            [node for node in nodes if node.meta[POSITION] in bucket and node.meta.get(IS_BACKWARD, False) == is_later]
            for is_later in (False, True)
            for bucket in self._plan
        ]
