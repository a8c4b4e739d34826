"""Graph passes: uses of torch's private compiler interfaces, and the differences between their versions.

Written for torch 2.11 to 2.15; importing the workload fails if the installed version lacks a name used here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._ordered_set import OrderedSet

try:
    from functorch.compile import aot_module_simplified  # type: ignore[import-untyped]
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes.bucketing import merge_all_reduce_bucket
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch._inductor.fx_passes.overlap_manual_scheduling import ManualOverlapScheduler
    from torch._inductor.fx_passes.overlap_scheduling import (
        OverlapScheduler,
        is_compute_node,
        schedule_overlap_bucketing,
    )

    from ..llama.partitioner import Partitioner
except ImportError as error:
    raise RuntimeError(f"llama_simple_fsdp does not support torch {torch.__version__}: {error}") from error

from .buckets import Bucket
from .cuda_graph import captured
from .estimation import precomputed_ms
from .labels import ALL_REDUCE, POSITION, check_labels, collectives, label_gather, label_reductions
from .parametrization import CollectiveGroups
from .settings import GraphSettings
from .whole_step import IS_BACKWARD, StepPartitioner

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]

# How torch writes an input of the traced graph, its gradient, or a part of either if they are DTensors.
_INPUT = re.compile(r"(?:__grad\()?args\[(\d+)\][.\w]*\)?[.\w]*")
_OVERRIDDEN = {
    ManualOverlapScheduler: ("_obtain_nodes_in_subgraph", "_manual_bucket_collectives"),
    OverlapScheduler: (
        "_collect_node_ancestors",
        "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks",
    ),
}


def make_backend(
    settings: GraphSettings,
    parameters: Mapping[str, nn.Parameter],
    buckets: Sequence[Bucket],
    groups: Mapping[str, CollectiveGroups],
    in_place: Sequence[Bucket] = (),
    kept: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the argument ``backend`` of ``torch.compile``.

    Args:
        parameters: the model's parameters, in registration order.
        buckets: names of the parameters that share a collective. If they belong to several process groups, each group
            has a collective of its own.
        groups: the process groups of each parameter's collectives.
        in_place: the buckets whose collectives ``overlap_reorder`` does not move.
        kept: names of the parameters whose gathered values are kept for backward even under ``reshard_after_forward``.
        options: further options of inductor.

    Raises:
        RuntimeError: This version of torch lacks an interface that the settings need.
    """
    if settings.backend == "eager":
        return "eager"
    _check_version()
    names = tuple(parameters)
    grouped = GroupedParameters(names, tuple(groups[name] for name in names))
    fixed = frozenset(names.index(name) for bucket in in_place for name in bucket)
    gathered_again = frozenset(
        number for number, name in enumerate(names) if settings.reshard_after_forward and name not in kept
    )

    traced: list[fx.GraphModule] = []

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        traced.append(graph_module)
        if settings.traces_step and len(traced) > 1:
            raise RuntimeError("trace is step, which is traced once, and the second call has inputs of other shapes")
        by_identity = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        inputs_positions = tuple(by_identity.get(id(value)) for value in inputs)
        if absent := sorted(set(range(len(names))) - set(inputs_positions)):
            raise RuntimeError(f"the traced graph does not read parameters {[names[number] for number in absent]}")
        joint = JointPass(inputs_positions, gathered_again, grouped)
        rewrite = CollectivesPass(settings, grouped, tuple(buckets), fixed)
        return _COMPILERS[settings.backend](graph_module, inputs, joint, rewrite, options or {})

    return compile_graph


def _check_version() -> None:
    absent = [name for scheduler, names in _OVERRIDDEN.items() for name in names if not hasattr(scheduler, name)]
    if absent:
        raise RuntimeError(
            f"llama_simple_fsdp does not support torch {torch.__version__}: its schedulers lack {absent}"
        )


@dataclass(frozen=True)
class GroupedParameters:
    """Parameters, by name in registration order, with the process groups of their collectives."""

    names: tuple[str, ...]
    groups: tuple[CollectiveGroups, ...]

    @property
    def shards(self) -> dict[int, str]:
        """Return the process group that gathers each parameter, by position; without parameters that none gathers."""
        return {number: group.shards for number, group in enumerate(self.groups) if group.shards is not None}

    @property
    def replicas(self) -> dict[int, str]:
        """Return the process group that sums each gradient over replicas, by position; without those that none sums."""
        return {number: group.replicas for number, group in enumerate(self.groups) if group.replicas is not None}

    def plan(self, buckets: Sequence[Bucket], group_of: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of the parameters in each bucket that have a group; a bucket is split by group."""
        number_of = {name: number for number, name in enumerate(self.names)}
        plan = []
        for bucket in buckets:
            by_group: dict[str, list[int]] = {}
            for number in sorted(number_of[name] for name in bucket):
                if number in group_of:
                    by_group.setdefault(group_of[number], []).append(number)
            plan += [tuple(numbers) for numbers in by_group.values()]
        return tuple(plan)


@dataclass(frozen=True)
class JointPass(CustomGraphPass):
    """A pass over forward and backward in one graph that labels collectives and marks gathers to be repeated.

    Attributes:
        inputs: for each input of the traced graph, the position of the parameter that it is, or None.
        gathered_again: the positions of the parameters that backward gathers again.
        parameters: all parameters, with their process groups.
    """

    inputs: tuple[int | None, ...]
    gathered_again: frozenset[int]
    parameters: GroupedParameters

    def __call__(self, graph: fx.Graph) -> None:
        """Write the labels into the nodes of ``graph``."""
        shards, replicas = self.parameters.shards, self.parameters.replicas
        for placeholder in graph.find_nodes(op="placeholder"):
            position = self._position(placeholder.meta.get("desc"))
            if position in shards:
                label_gather(placeholder, position, position in self.gathered_again)
        check_labels(graph, shards, set(shards.values()))
        output = graph.output_node()
        for value, description in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            position = self._position(description)
            # Placeholders among the outputs are meshes of DTensors that the graph passes through.
            if position is not None and isinstance(value, fx.Node) and value.op != "placeholder":
                label_reductions(value, position, is_sharded=position in shards, is_replicated=position in replicas)

    def uuid(self) -> Any:
        """Return the key of this pass in torch's caches of compiled graphs."""
        return _uuid(self)

    def _position(self, description: Any) -> int | None:
        """Return the position of a parameter, given the description of its input or gradient; else None."""
        found = None if description is None else _INPUT.fullmatch(description.expr())
        return self.inputs[int(found[1])] if found else None


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


def _derived(wait: fx.Node) -> list[fx.Node]:
    """Return ``wait`` and the nodes that need its value, without the graph's output, in the graph's order."""
    found, queue = {wait}, [wait]
    while queue:
        users = [user for user in queue.pop().users if user not in found and user.op != "output"]
        found.update(users)
        queue += users
    return sorted(found)


def _move_behind(nodes: Sequence[fx.Node], place: fx.Node) -> None:
    """Move those of ``nodes`` that precede ``place`` behind it, in the same order."""
    for node in nodes:
        if node < place:
            place.append(node)
            place = node


class _WithoutFormulas(OverlapScheduler):
    """A scheduler that never calls torch's own formulas for run times.

    Those formulas fail on a CPU, because they lack its memory bandwidth, and up to torch 2.12 on grouped-query
    attention. Torch 2.13 evaluates them even for nodes of ``custom_runtime_estimation`` and with ``compute_estimator``
    ``analytical``, so ``schedule_overlap_bucketing`` can't be called in place of this class.
    """

    def __init__(self, graph_module: fx.GraphModule, *args: Any, **options: Any) -> None:
        # Torch applies no formula to a node without a value. The values are restored before any other use.
        self._values = {
            node: node.meta.pop("val")
            for node in graph_module.graph.nodes
            if is_compute_node(node) and "val" in node.meta
        }
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

    def _restore(self) -> None:
        while self._values:
            node, value = self._values.popitem()
            node.meta["val"] = value

    def _align_compute_nodes_runtime_estimations_across_all_distributed_ranks(self) -> None:
        """Do nothing: estimates from shapes alone are the same on all ranks."""


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
            [
                node
                for node in nodes
                if node.meta[POSITION] in bucket and node.meta.get(IS_BACKWARD, False) == is_backward
            ]
            for is_backward in (False, True)
            for bucket in self._plan
        ]


def _schedule(graph_module: fx.GraphModule, bucketing: bool, insert_overlap_deps: bool) -> None:
    """Overlap collectives with compute by estimated times; also merge collectives if ``bucketing``."""
    defaults = {name: item.default for name, item in inspect.signature(schedule_overlap_bucketing).parameters.items()}
    if bucketing and "pre_bucketing_fsdp_collectives" in defaults:
        # Torch's own scheduler has had this step since 2.13.
        pre_bucket = importlib.import_module("torch._inductor.fx_passes.fsdp").pre_bucket_fsdp_collectives
        pre_bucket(graph_module, mode=None, bucket_cap_mb=None)
    taken = inspect.signature(OverlapScheduler).parameters
    options = {name: value for name, value in defaults.items() if name in taken and name != "gm"} | {
        "collective_bucketing": bucketing,
        "insert_overlap_deps": insert_overlap_deps,
        "custom_runtime_estimation": precomputed_ms(graph_module.graph),
    }
    _WithoutFormulas(graph_module, **options).run()
    graph_module.recompile()


def _partitioner(settings: GraphSettings) -> Partitioner:
    return StepPartitioner() if settings.traces_step else Partitioner()


def _compile_aot_eager(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    joint: JointPass,
    rewrite: CollectivesPass,
    _options: Mapping[str, Any],
) -> Any:
    def partition(joint_module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        joint(joint_module.graph)
        return _partitioner(rewrite.settings)(joint_module, joint_inputs, **options)

    def compiler(module: fx.GraphModule, module_inputs: list[Any]) -> Any:
        rewrite(module.graph)
        return boxed_nop(module, module_inputs)

    def compile_step(module: fx.GraphModule, module_inputs: list[Any]) -> Any:
        parameters = [value for value, position in zip(inputs, joint.inputs, strict=True) if position is not None]
        return captured(compiler(module, module_inputs), parameters)

    compiled = aot_module_simplified(
        graph_module,
        inputs,
        fw_compiler=compile_step if rewrite.settings.cuda_graphs else compiler,
        bw_compiler=torch.compiler.disable(compiler),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return torch.compiler.disable(compiled)


def _compile_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    joint: JointPass,
    rewrite: CollectivesPass,
    options: Mapping[str, Any],
) -> Any:
    patches = dict(options) | {"joint_custom_pre_pass": joint, "custom_partitioner_fn": _partitioner(rewrite.settings)}
    if rewrite.settings.has_graph_pass:
        patches |= {
            "post_grad_custom_post_pass": rewrite,
            # Inductor's reordering would undo this pass, and buffer reuse would overwrite the buffer of a running
            # collective.
            "reorder_for_compute_comm_overlap": False,
            "reorder_for_peak_memory": False,
            "allow_buffer_reuse": False,
        }
    return compile_fx(graph_module, inputs, config_patches=patches)


_COMPILERS = {"aot_eager": _compile_aot_eager, "inductor": _compile_inductor}


def _uuid(graph_pass: Any) -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(sources) + repr(graph_pass).encode()).hexdigest()
