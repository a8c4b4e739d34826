"""Float8 matrix products in the linear layers of blocks, by torchao, on GPUs that support them."""

import importlib.util

import torch
from torch import nn

# The least compute capability with products of float8: Ada, and MI300 among AMD's GPUs, whose MI200 has (9, 0).
_NEEDED_CUDA, _NEEDED_HIP = (8, 9), (9, 4)


# Inductor joins the reductions of RMSNorm's backward pass with the casts to float8 into kernels that take ten times as
# long as those apart: 23 ms instead of 2 ms a step in 8 blocks of Llama 3 8B on one H100.
FLOAT8_OPTIONS = {"triton.mix_order_reduction": False}


def check_float8(device: torch.device) -> None:
    """Raise RuntimeError that says which is missing: torchao, CUDA, or a GPU with products of float8."""
    missing, needed = [], _NEEDED_HIP if torch.version.hip else _NEEDED_CUDA
    if device.type != "cuda":
        missing.append(f"CUDA (ranks are on {device.type})")
    elif (found := torch.cuda.get_device_capability(device)) < needed:
        missing.append(f"compute capability {needed} (the GPU has {found})")
    if importlib.util.find_spec("torchao") is None:
        missing.append("the package torchao")
    if missing:
        raise RuntimeError(f"float8_linear is true, and this launch is missing {' and '.join(missing)}")


def convert_layers(model: nn.Module, recipe: str, *, with_output: bool) -> None:
    """Replace the linear layers of all blocks, and the output layer if asked, before they are sharded.

    Every forward pass casts weights. A replaced output layer computes no loss.
    """
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name.startswith("layers.") or (with_output and name == "output")

    torchao.convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)
    if with_output:
        model.output.num_chunks = 0  # type: ignore[union-attr]
