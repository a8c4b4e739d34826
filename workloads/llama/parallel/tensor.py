"""Tensor parallelism with sequence parallelism: Megatron-LM's split of a block (arXiv 1909.08053, 2205.05198)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..model.chunked_loss import Output, Vocabulary
from ..model.decoder import Block, Llama
from ..model.experts import MoeFeedForward
from ..model.latent import LatentAttention
from ..model.local import local_value

# Activations between attention and feed-forward are [batch, sequence, dim], split along the sequence.
_SEQUENCE = Shard(1)


def check_tensor_parallel(degree: int, sizes: dict[str, int]) -> None:
    """Raise ValueError if one of ``sizes``, named by dimension, is not a multiple of ``degree``."""
    if uneven := {name: size for name, size in sizes.items() if size % degree}:
        raise ValueError(
            f"tensor_parallel_degree is {degree}, and sizes that are not multiples of {degree} are {uneven}"
        )


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Make a parameter of ``module``, which is on the meta device, a DTensor on ``mesh``."""
    # There is no data to send on the meta device.
    own = distribute_tensor(module.get_parameter(name), mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(own))


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, chunked_loss: bool) -> None:
    """Make every parameter a DTensor on the one-dimensional ``mesh``, and add the collectives between modules.

    With ``chunked_loss``, the output is the loss, and ranks exchange sums of their logits instead of logits.
    """
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
        "norm": SequenceParallel(),
        "output": (
            _VocabularyParallel()
            if chunked_loss
            else ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate())
        ),
    }
    kept = [name for name in outer if not isinstance(model.get_submodule(name), nn.Identity)]
    parallelize_module(model, mesh, {name: outer[name] for name in kept})
    for layer in model.layers:
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, _block_plan(layer))
    model.tok_embeddings.register_forward_hook(_waited)


class _VocabularyParallel(ParallelStyle):
    """Splits the vocabulary of an :class:`Output` that computes the loss, and gathers its input along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Output)
        distribute_parameter(module, "weight", device_mesh, [Shard(0)])
        num_rows = module.out_features // device_mesh.size()
        group = device_mesh.get_group().group_name
        module.vocabulary = Vocabulary(device_mesh.get_local_rank() * num_rows, group)

        def gather(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # The norm before it returns a DTensor that is split along the sequence.
            whole = inputs[0].redistribute(placements=[Replicate()])
            # Each rank has the gradient of its own part of the vocabulary.
            return local_value(whole), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Distributed(ParallelStyle):
    """Gives the parameters of a module their placements; inputs and outputs stay as they are."""

    def __init__(self, **placements: Placement) -> None:
        super().__init__()
        self._placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            distribute_parameter(module, name, device_mesh, [placement])
        return module


def _block_plan(block: Block) -> dict[str, ParallelStyle]:
    attention = _latent_plan(block.attention) if isinstance(block.attention, LatentAttention) else _grouped_plan()
    feed_forward = (
        _mixture_plan(block.feed_forward) if isinstance(block.feed_forward, MoeFeedForward) else _dense_plan()
    )
    return {
        "attention_norm": SequenceParallel(),
        # The second input, freqs_cis, is a plain tensor.
        "attention": PrepareModuleInput(input_layouts=(_SEQUENCE, None), desired_input_layouts=(Replicate(), None)),
        **{f"attention.{name}": style for name, style in attention.items()},
        "attention.wo": RowwiseParallel(output_layouts=_SEQUENCE),
        "ffn_norm": SequenceParallel(),
        **{f"feed_forward{name}": style for name, style in feed_forward.items()},
    }


def _grouped_plan() -> dict[str, ParallelStyle]:
    return {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}


def _latent_plan(attention: LatentAttention) -> dict[str, ParallelStyle]:
    """Split heads; latent vectors, which all heads share, are computed on each rank."""
    whole = [name for name in ("wq_down", "q_norm", "wkv_down", "kv_norm") if hasattr(attention, name)]
    return {"wq": ColwiseParallel(), "wkv": ColwiseParallel()} | {
        name: _Distributed(weight=Replicate()) for name in whole
    }


def _dense_plan() -> dict[str, ParallelStyle]:
    return {
        "": PrepareModuleInput(input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),)),
        ".w1": ColwiseParallel(),
        ".w2": RowwiseParallel(output_layouts=_SEQUENCE),
        ".w3": ColwiseParallel(),
    }


def _mixture_plan(mixture: MoeFeedForward) -> dict[str, ParallelStyle]:
    """Sum the outputs of experts, which ``split_experts`` splits; each rank routes all tokens, with the same result."""
    shared: dict[str, ParallelStyle] = {
        ".shared.w1": ColwiseParallel(),
        # The outputs of shared and of other experts are added before they are summed over ranks.
        ".shared.w2": RowwiseParallel(output_layouts=Partial()),
        ".shared.w3": ColwiseParallel(),
    }
    return {
        "": PrepareModuleInputOutput(
            input_layouts=(_SEQUENCE,),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Partial(),),
            desired_output_layouts=(_SEQUENCE,),
        ),
        ".router": _Distributed(weight=Replicate()),
        **(shared if mixture.shared is not None else {}),
    }


def _waited(_module: nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return a copy of the embedding's output, which waits for the collective that writes the output.

    Torch 2.13 loses the gradient of a compiled block's input that a collective has not written yet.
    """
    return output.clone()
