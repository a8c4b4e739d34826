"""Linear layers of the blocks that multiply in float8, by torchao; for GPUs that have such matrix products."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import nn

from .mesh import Degrees
from .model import LlamaConfig

_NEEDED = (8, 9)
# What torch._scaled_mm asks of every size.
_MULTIPLE = 16


def check_float8(device: torch.device, degrees: Degrees, config: LlamaConfig, tokens: int) -> None:
    """See that ``float8_linear`` can be had; ``tokens`` are those of one micro-batch on a rank.

    Raises:
        RuntimeError: torchao, CUDA or a GPU of compute capability 8.9 is lacking; the message says which.
        ValueError: tensor parallelism is asked for too, or a size is no multiple of 16.
    """
    if degrees.tensor_parallel > 1:
        raise ValueError(
            f"float8_linear is true and tensor_parallel_degree is {degrees.tensor_parallel}: torchao splits float8 "
            f"layers with styles of its own, which these workloads do not use; allowed is one of the two"
        )
    sizes = {
        "dim": config.dim,
        "n_kv_heads x head_dim": config.n_kv_heads * config.head_dim,
        "ffn_hidden": config.ffn_hidden,
        "tokens of a micro-batch on a rank": tokens,
    }
    if odd := {name: size for name, size in sizes.items() if size % _MULTIPLE}:
        raise ValueError(f"float8_linear is true, and no multiples of {_MULTIPLE} are {odd}")
    lacking = []
    if device.type != "cuda":
        lacking.append(f"CUDA (ranks are on {device.type})")
    elif (found := torch.cuda.get_device_capability(device)) < _NEEDED:
        lacking.append(f"compute capability {_NEEDED} (the GPU has {found})")
    if importlib.util.find_spec("torchao") is None:
        lacking.append("the package torchao")
    if lacking:
        raise RuntimeError(f"float8_linear is true, and lacking are {' and '.join(lacking)}")


def convert_blocks(model: nn.Module) -> None:
    """Replace the linear layers of all blocks, before they are sharded; weights are cast in every forward."""
    torchao = importlib.import_module("torchao.float8")
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name.startswith("layers."))
