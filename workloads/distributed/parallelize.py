"""The checks of all axes together, and the changes that the axes make to a Llama model."""

from __future__ import annotations

import torch

from ..config import LlamaSettings
from ..models.common.decoder import Decoder
from ..models.common.float8 import check_float8, convert_blocks
from .context import apply_context_parallel, own_positions
from .expert import check_experts, dispatch_tokens, split_experts
from .parallel_dims import ParallelDims, ParallelMesh
from .pipeline import check_pipeline, count_stages, keep_stage, split_stages, stages_of_rank
from .tensor import apply_tensor_parallel, check_tensor_parallel


def check_parallelism(settings: LlamaSettings, world_size: int, device: torch.device) -> ParallelDims:
    """Return the degrees of all axes in a world of ``world_size`` ranks.

    Raises:
        RuntimeError: ``float8_linear`` is true, and a package or a device that it needs is missing.
        ValueError: The combination can't run; the message names the keys.
    """
    degrees, model = ParallelDims.of_world(settings.degrees, world_size), settings.model
    check_pipeline(degrees.pipeline_parallel, settings)
    num_positions = len(own_positions(settings.seq_len, degrees.context_parallel, 0))
    split = {
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "ffn_hidden": model.ffn_hidden,
        "vocab_size": model.vocab_size,
        "positions of a rank": num_positions,
    }
    check_tensor_parallel(degrees.tensor_parallel, split)
    check_experts(settings, degrees)
    _check_latent(settings)
    settings.check_own()
    settings.communication.check_device(device.type)
    if settings.float8_linear:
        check_float8(device, degrees.tensor_parallel, model, settings.batch_size * num_positions)
    return degrees


def _check_latent(settings: LlamaSettings) -> None:
    """Raise ValueError for latent attention with converted projections."""
    if (width := settings.model.latent.kv_lora_rank) and settings.float8_linear:
        raise ValueError(
            f"kv_lora_rank is {width} and float8_linear is true: latent projections are not converted; use one of "
            f"the two"
        )


def parallelize(model: Decoder, mesh: ParallelMesh, settings: LlamaSettings) -> list[Decoder]:
    """Change the modules of ``model``, which is on the meta device, for all axes but data parallelism.

    Return the models that a step runs: that of each stage of this rank, or ``model`` itself.
    """
    if mesh.pipeline is None:
        _split_modules(model, mesh, settings)
        return [model]
    schedule, num_ranks = settings.pipeline_parallel_schedule, mesh.pipeline.size()
    stages, num_stages = (
        stages_of_rank(schedule, num_ranks, mesh.pipeline.get_local_rank()),
        count_stages(schedule, num_ranks),
    )
    keep_stage(model, num_stages, *stages)
    _split_modules(model, mesh, settings)
    return split_stages(model, num_stages, stages)


def _split_modules(model: Decoder, mesh: ParallelMesh, settings: LlamaSettings) -> None:
    if settings.float8_linear:
        convert_blocks(model, settings.float8_recipe)
    if mesh.tensor is not None:
        apply_tensor_parallel(model, mesh.tensor, chunked_loss=settings.loss_chunks > 0)
    if mesh.context is not None:
        apply_context_parallel(model, mesh.context, settings.seq_len)
    if (split := mesh.expert_axes.non_dp_mesh) is not None:
        split_experts(model, split, distributed=mesh.experts is not None, tensor_parallel=mesh.tensor is not None)
    if mesh.experts is not None:
        dispatch_tokens(model, mesh.experts)
