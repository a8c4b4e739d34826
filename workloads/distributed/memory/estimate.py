"""The memory of one rank's training step, estimated from the config, the layout and fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...config import LlamaSettings
from ...models import build_model
from ...models.common.decoder import Decoder
from ...models.common.moe import Experts
from ..activation_checkpoint import LADDER
from ..context import own_positions
from ..parallel_dims import ParallelMesh
from ..parallelize import parallelize
from .pieces import Shapes, by_kind, of_chunked_loss, of_loss
from .step import Activations, Communication, StepMemory, Unit

# cuBLAS allocates a workspace of 32 MiB for each stream that runs matrix products; two streams are assumed.
_MATMUL_WORKSPACE = 64 << 20


@dataclass(frozen=True)
class Gathering:
    """The way in which a workload compiles blocks and gathers their parameters.

    Attributes:
        compiler: the torch.compile backend of the blocks; None for eager blocks.
        num_ahead: number of units whose parameters are gathered while another unit runs.
        blocks_per_unit: largest number of blocks whose parameters are gathered together, as one unit.
        kept_by: kinds of checkpointing under which a block keeps its gathered parameters until its backward pass.
        accumulates_unsharded: whether micro-batches add up unsharded gradients, which only the last micro-batch
            reduces.
    """

    compiler: str | None
    num_ahead: int = 1
    blocks_per_unit: int = 1
    kept_by: frozenset[str] = field(default_factory=frozenset)
    accumulates_unsharded: bool = False


def estimate(settings: LlamaSettings, mesh: ParallelMesh, device: torch.device, gathering: Gathering) -> StepMemory:
    """Return the parts of this rank's step in bytes, without allocating memory on ``device``."""
    with torch.device("meta"):
        model = build_model(settings.model)
    model.output.num_chunks, model.output.fused = settings.loss_chunks, settings.compile_loss
    parallelize(model, mesh, settings)
    shapes = _shapes(settings, mesh, device)
    blocks = list(model.layers.children())
    embedding, block, head = (
        _unit(modules, mesh, settings) for modules in ([model.tok_embeddings], blocks[:1], [model.norm, model.output])
    )
    inputs = shapes.batch_size * shapes.num_inputs * settings.model.dim * shapes.dtype.itemsize
    first = int(next(iter(model.layers._modules)))
    whole = embedding + head
    for _ in blocks:
        whole += block
    is_accumulated = settings.gradient_accumulation > 1
    unsharded = whole.reduced if is_accumulated and gathering.accumulates_unsharded else 0
    return StepMemory(
        embedding=embedding,
        block=block,
        head=head,
        blocks=range(first, first + len(blocks)),
        inputs=inputs,
        by_kind=by_kind(model, shapes, gathering.compiler),
        loss=_loss(model, shapes, settings),
        communication=_communication(block, gathering, unsharded),
        num_in_flight=_num_in_flight(settings, mesh),
        keeps_gradients=is_accumulated and not gathering.accumulates_unsharded,
        batches=_batches(settings, shapes) + (_received(settings, inputs) if mesh.pipeline is not None else 0),
        workspace=_workspace(settings, mesh, shapes),
        optimizer=_optimizer(settings, whole, device),
    )


def _shapes(settings: LlamaSettings, mesh: ParallelMesh, device: torch.device) -> Shapes:
    num_positions = len(own_positions(settings.seq_len, mesh.degrees.context_parallel, mesh.context_rank))
    return Shapes(
        batch_size=settings.batch_size,
        num_inputs=num_positions // mesh.degrees.tensor_parallel,
        num_positions=num_positions,
        dtype=settings.param_dtype,
        device=device,
    )


def _unit(modules: Iterable[nn.Module], mesh: ParallelMesh, settings: LlamaSettings) -> Unit:
    """Return the bytes of the parameters of ``modules``: this rank's shards, and the gathered values for compute."""
    total = Unit()
    for owner in (owner for module in modules for owner in module.modules()):
        axes = mesh.expert_axes if isinstance(owner, Experts) else mesh.dense_axes
        for parameter in owner.parameters(recurse=False):
            numel = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
            total += Unit(
                shards=-(-numel // axes.shards.size()) * torch.float32.itemsize,
                gathered=numel * settings.param_dtype.itemsize,
                reduced=numel * settings.reduce_dtype.itemsize,
            )
    return total


def _communication(block: Unit, gathering: Gathering, unsharded_gradients: int) -> Communication:
    kept = {kind: block.gathered if kind in gathering.kept_by else 0 for kind in LADDER}
    # Where blocks keep gathered parameters, one further unit counts: FSDP2 copies parameters out of the buffer of an
    # all-gather, and frees the buffer before the next all-gather.
    num_units = 1 if len(gathering.kept_by) == len(LADDER) else 1 + gathering.num_ahead
    return Communication(
        in_flight=num_units * gathering.blocks_per_unit * block.gathered,
        reductions=gathering.blocks_per_unit * block.reduced,
        unsharded_gradients=unsharded_gradients,
        kept_gathers=kept,
        gathered=block.gathered,
    )


def _loss(model: Decoder, shapes: Shapes, settings: LlamaSettings) -> Activations:
    if settings.loss_chunks:
        return of_chunked_loss(model, shapes, settings.loss_chunks)
    return of_loss(model, shapes, fused=settings.compile_loss)


def _num_in_flight(settings: LlamaSettings, mesh: ParallelMesh) -> int:
    """Return the largest number of micro-batches that wait for backward; under 1F1B, the first stage has the most."""
    if mesh.pipeline is None:
        return 1
    return min(settings.gradient_accumulation, mesh.pipeline.size() - mesh.pipeline.get_local_rank())


def _batches(settings: LlamaSettings, shapes: Shapes) -> int:
    num_steps = settings.warmup + settings.steps
    tokens = settings.gradient_accumulation * shapes.batch_size * shapes.num_positions
    return num_steps * 2 * tokens * torch.int64.itemsize


def _received(settings: LlamaSettings, inputs: int) -> int:
    """Return the bytes of torch's buffers for activations and gradients from other stages, of all micro-batches."""
    return 2 * settings.gradient_accumulation * inputs


def _workspace(settings: LlamaSettings, mesh: ParallelMesh, shapes: Shapes) -> int:
    """Return the bytes that CUDA kernels allocate for themselves."""
    if shapes.device.type != "cuda":
        return 0
    # Attention's backward pass adds up the gradients of the queries in float32.
    width = settings.model.n_heads * settings.model.key_dim // mesh.degrees.tensor_parallel
    queries = shapes.batch_size * shapes.num_positions * width
    return _MATMUL_WORKSPACE + queries * torch.float32.itemsize


def _optimizer(settings: LlamaSettings, whole: Unit, device: torch.device) -> int:
    """Return AdamW's temporary bytes: unfused on CUDA, it takes the square roots of all second moments at once."""
    return whole.shards if settings.optimizer_fused is False and device.type == "cuda" else 0
