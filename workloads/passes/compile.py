"""The compilation of a traced graph: the ordered passes, and the backend that runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import aot_module_simplified  # type: ignore[import-untyped]
from torch import fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.overlap_manual_scheduling import ManualOverlapScheduler
from torch._inductor.fx_passes.overlap_scheduling import OverlapScheduler

from ..config import GraphSettings
from .annotate import (
    Bucket,
    CollectiveGroups,
    GroupedParameters,
    JointPass,
)
from .bucket import CollectivesPass
from .cuda_graph import captured
from .partition import Partitioner
from .whole_step import StepPartitioner

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]
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
    no_reshard: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the argument ``backend`` of ``torch.compile``.

    Args:
        parameters: the model's parameters, in registration order.
        buckets: names of the parameters that share a collective. If they belong to several process groups, each group
            has a collective of its own.
        groups: the process groups of each parameter's collectives.
        in_place: the buckets whose collectives ``overlap_reorder`` does not move.
        no_reshard: names of the parameters that stay gathered for backward even under ``reshard_after_forward``.
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
    resharded = frozenset(
        number for number, name in enumerate(names) if settings.reshard_after_forward and name not in no_reshard
    )

    traced: list[fx.GraphModule] = []

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        traced.append(graph_module)
        if settings.traces_step and len(traced) > 1:
            raise RuntimeError("trace is step, which is traced once, and this call's inputs have other shapes")
        by_identity = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        inputs_positions = tuple(by_identity.get(id(value)) for value in inputs)
        if absent := sorted(set(range(len(names))) - set(inputs_positions)):
            raise RuntimeError(f"the traced graph does not read parameters {[names[number] for number in absent]}")
        joint = JointPass(inputs_positions, resharded, grouped)
        rewrite = CollectivesPass(settings, grouped, tuple(buckets), fixed)
        return _COMPILERS[settings.backend](graph_module, inputs, joint, rewrite, options or {})

    return compile_graph


def _check_version() -> None:
    absent = [name for scheduler, names in _OVERRIDDEN.items() for name in names if not hasattr(scheduler, name)]
    if absent:
        raise RuntimeError(
            f"llama_simple_fsdp does not support torch {torch.__version__}: its schedulers lack {absent}"
        )


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
