"""The compilation of a traced graph: the passes in their order, and the backend that runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import aot_module_simplified  # type: ignore[import-untyped]
from torch import fx, nn

from ..common.torch_private import CustomGraphPass, get_hash_for_files
from ..config import GraphSettings
from .annotate import Bucket, CollectiveGroups, Traced, annotate
from .bucket import bucket_collectives
from .cuda_graph import CapturedStep
from .partition import Partitioner, StepPartitioner
from .reorder import reorder_collectives
from .torch_private import boxed_nop, compile_fx

# All passes in their order. The first one sees forward and backward in one graph, the others see each alone.
PASSES: dict[str, Callable[[fx.Graph, Traced], None]] = {
    "annotate": annotate,
    "bucket": bucket_collectives,
    "reorder": reorder_collectives,
}
_JOINT, *_SEPARATE = PASSES


@dataclass(frozen=True)
class GraphPasses(CustomGraphPass):
    """The passes ``names`` in turn, without those of ``disable_passes``."""

    names: tuple[str, ...]
    traced: Traced

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place, and write it to a file after each pass if ``dump_graphs`` names a folder."""
        graph_module, settings = graph.owning_module, self.traced.settings
        assert graph_module is not None
        for name in self.names:
            if name not in settings.disable_passes:
                PASSES[name](graph, self.traced)
            if settings.dump_graphs is not None:
                _dump(graph_module, Path(settings.dump_graphs, f"rank{dist.get_rank()}"), name)
        graph_module.recompile()

    def uuid(self) -> Any:
        """Return the key of these passes in torch's caches of compiled graphs; None compiles anew, to write graphs."""
        if self.traced.settings.dump_graphs is not None:
            return None
        return get_hash_for_files(tuple(map(str, sorted(Path(__file__).parent.glob("*.py")))), repr(self))


def _dump(graph_module: fx.GraphModule, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))
    (folder / f"{number:02}_{name}.txt").write_text(graph_module.print_readable(print_output=False))


def make_backend(
    settings: GraphSettings,
    parameters: Mapping[str, nn.Parameter],
    buckets: Sequence[Bucket],
    groups: Mapping[str, CollectiveGroups],
    no_reorder: Sequence[Bucket] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the argument ``backend`` of ``torch.compile``.

    Args:
        parameters: the model's parameters, in registration order.
        buckets: names of the parameters that share a collective. If they belong to several process groups, each group
            has a collective of its own.
        groups: the process groups of each parameter's collectives.
        no_reorder: the buckets whose collectives ``overlap_reorder`` does not move.
        options: further options of inductor.
    """
    if settings.backend == "eager":
        return "eager"
    names = tuple(parameters)
    of_position = list(enumerate(groups[name] for name in names))
    shards = {number: group.shards for number, group in of_position if group.shards is not None}
    replicas = {number: group.replicas for number, group in of_position if group.replicas is not None}
    fixed = frozenset(names.index(name) for bucket in no_reorder for name in bucket)
    graphs: list[fx.GraphModule] = []

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph_module)
        if settings.trace == "step" and len(graphs) > 1:
            raise RuntimeError("trace is step, which is traced once, and this call's inputs have other shapes")
        by_identity = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        inputs_positions = tuple(by_identity.get(id(value)) for value in inputs)
        if absent := sorted(set(range(len(names))) - set(inputs_positions)):
            raise RuntimeError(f"the traced graph does not read parameters {[names[number] for number in absent]}")
        traced = Traced(settings, names, shards, replicas, inputs_positions, tuple(buckets), fixed)
        return COMPILERS[settings.backend](graph_module, inputs, traced, options or {})

    return compile_graph


def _partitioner(settings: GraphSettings) -> Partitioner:
    return StepPartitioner() if settings.trace == "step" else Partitioner()


def compile_aot_eager(
    graph_module: fx.GraphModule, inputs: Sequence[Any], traced: Traced, _options: Mapping[str, Any]
) -> Any:
    """Run the passes and return the graph, whose operators run one after another."""

    def partition(joint_module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        GraphPasses((_JOINT,), traced)(joint_module.graph)
        return _partitioner(traced.settings)(joint_module, joint_inputs, **options)

    def compiler(module: fx.GraphModule, module_inputs: list[Any]) -> Any:
        GraphPasses(tuple(_SEPARATE), traced)(module.graph)
        return boxed_nop(module, module_inputs)

    def compile_step(module: fx.GraphModule, module_inputs: list[Any]) -> Any:
        parameters = [value for value, position in zip(inputs, traced.inputs, strict=True) if position is not None]
        return CapturedStep(compiler(module, module_inputs), parameters)

    compiled = aot_module_simplified(
        graph_module,
        inputs,
        fw_compiler=compile_step if traced.settings.cuda_graphs else compiler,
        bw_compiler=torch.compiler.disable(compiler),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return torch.compiler.disable(compiled)


def compile_inductor(
    graph_module: fx.GraphModule, inputs: Sequence[Any], traced: Traced, options: Mapping[str, Any]
) -> Any:
    """Run the passes in inductor, which compiles the graph and keeps the order of moved collectives."""
    settings = traced.settings
    patches = dict(options) | {
        "joint_custom_pre_pass": GraphPasses((_JOINT,), traced),
        "custom_partitioner_fn": _partitioner(settings),
    }
    if settings.bucketing != "none" or settings.overlap_reorder:
        patches |= {
            "post_grad_custom_post_pass": GraphPasses(tuple(_SEPARATE), traced),
            # Inductor's reordering would undo these passes, and buffer reuse would overwrite the buffer of a running
            # collective.
            "reorder_for_compute_comm_overlap": False,
            "reorder_for_peak_memory": False,
            "allow_buffer_reuse": False,
        }
    return compile_fx(graph_module, inputs, config_patches=patches)


COMPILERS = {"aot_eager": compile_aot_eager, "inductor": compile_inductor}
