"""What a config's axes ask of a Llama model: whether it can be, and the modules that make it so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .context_parallel import apply_context_parallel, own_positions
from .expert_parallel import apply_expert_parallel, check_experts
from .float8 import check_float8, convert_blocks
from .mesh import Degrees, ParallelMesh
from .model import Llama, LlamaConfig
from .pipeline import check_pipeline, keep_stage
from .tensor_parallel import apply_tensor_parallel, check_tensor_parallel

_SPLIT_BY_TENSOR_PARALLEL = ("n_heads", "n_kv_heads", "ffn_hidden", "vocab_size")


def check_parallelism(config: Mapping[str, Any], world_size: int, device: torch.device) -> Degrees:
    """Read the degrees of all axes.

    Raises:
        RuntimeError: ``float8_linear`` is asked for and what it needs is lacking.
        ValueError: a combination that can't run; the message names the keys.
    """
    degrees = Degrees.from_config(config, world_size)
    check_pipeline(degrees.pipeline_parallel, config)
    num_positions = len(own_positions(config["seq_len"], degrees.context_parallel, 0))
    sizes = {key: config[key] for key in _SPLIT_BY_TENSOR_PARALLEL}
    check_tensor_parallel(degrees.tensor_parallel, sizes | {"positions of a rank": num_positions})
    check_experts(config, degrees)
    if config["float8_linear"]:
        check_float8(device, degrees, LlamaConfig.from_config(config), config["batch_size"] * num_positions)
    return degrees


def parallelize(model: Llama, mesh: ParallelMesh, config: Mapping[str, Any]) -> None:
    """Change the modules of ``model``, which is on the meta device, for all axes but data parallelism."""
    if mesh.pipeline is not None:
        keep_stage(model, mesh.pipeline.size(), mesh.pipeline.get_local_rank())
    if config["float8_linear"]:
        convert_blocks(model)
    if mesh.tensor is not None:
        apply_tensor_parallel(model, mesh.tensor)
    if mesh.context is not None:
        apply_context_parallel(model, mesh.context, config["seq_len"])
    if mesh.experts is not None:
        apply_expert_parallel(model, mesh.experts)
