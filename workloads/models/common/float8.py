"""Float8 matrix products in the linear layers of blocks, by torchao, on GPUs that support them."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import nn

from ..config import ModelConfig

# The least compute capability with products of float8: Ada, and MI300 among AMD's GPUs, whose MI200 has (9, 0).
_NEEDED_CUDA, _NEEDED_HIP = (8, 9), (9, 4)
# torch._scaled_mm needs every size to be a multiple of this.
_MULTIPLE = 16


def check_float8(device: torch.device, tensor_parallel: int, config: ModelConfig, tokens: int) -> None:
    """Check that ``float8_linear`` can run; ``tokens`` is the number of tokens of one micro-batch on a rank.

    Raises:
        RuntimeError: torchao, CUDA or a GPU of compute capability 8.9, or 9.4 on ROCm, is missing; the message says
            which.
        ValueError: Tensor parallelism is asked for too, or a size is not a multiple of 16.
    """
    if tensor_parallel > 1:
        raise ValueError(
            f"float8_linear is true and tensor_parallel_degree is {tensor_parallel}: torchao splits float8 "
            f"layers with styles of its own, which these workloads do not use; use one of the two"
        )
    sizes = {
        "dim": config.dim,
        "n_kv_heads x head_dim": config.n_kv_heads * config.head_dim,
        "ffn_hidden": config.ffn_hidden,
        "tokens of a micro-batch on a rank": tokens,
    }
    if uneven := {name: size for name, size in sizes.items() if size % _MULTIPLE}:
        raise ValueError(f"float8_linear is true, and sizes that are not multiples of {_MULTIPLE} are {uneven}")
    missing, needed = [], _NEEDED_HIP if torch.version.hip else _NEEDED_CUDA
    if device.type != "cuda":
        missing.append(f"CUDA (ranks are on {device.type})")
    elif (found := torch.cuda.get_device_capability(device)) < needed:
        missing.append(f"compute capability {needed} (the GPU has {found})")
    if importlib.util.find_spec("torchao") is None:
        missing.append("the package torchao")
    if missing:
        raise RuntimeError(f"float8_linear is true, and this launch is missing {' and '.join(missing)}")


def convert_blocks(model: nn.Module, recipe: str) -> None:
    """Replace the linear layers of all blocks before they are sharded; every forward pass casts weights."""
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name.startswith("layers.")
    )
