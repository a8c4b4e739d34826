"""Tensor parallelism with sequence parallelism: Megatron-LM's split of a block (arXiv 1909.08053, 2205.05198)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..model.chunked_loss import Output, Vocabulary
from ..model.decoder import Llama

# Activations between attention and feed-forward are [batch, sequence, dim], split along the sequence.
_SEQUENCE = Shard(1)


def check_tensor_parallel(degree: int, sizes: dict[str, int]) -> None:
    """Raise ValueError if one of ``sizes``, named by dimension, is not a multiple of ``degree``."""
    if uneven := {name: size for name, size in sizes.items() if size % degree}:
        raise ValueError(
            f"tensor_parallel_degree is {degree}, and sizes that are not multiples of {degree} are {uneven}"
        )


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
        parallelize_module(layer, mesh, _block_plan())
    model.tok_embeddings.register_forward_hook(_waited)


class _VocabularyParallel(ParallelStyle):
    """Splits the vocabulary of an :class:`Output` that computes the loss, and gathers its input along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Output)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        num_rows = module.out_features // device_mesh.size()
        group = device_mesh.get_group().group_name
        module.vocabulary = Vocabulary(device_mesh.get_local_rank() * num_rows, group)

        def gather(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # The norm before it returns a DTensor that is split along the sequence.
            whole = inputs[0].redistribute(placements=[Replicate()])
            # Each rank has the gradient of its own part of the vocabulary.
            return whole.to_local(grad_placements=[Partial("sum")]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        # The second input, rotations, is a plain tensor.
        "attention": PrepareModuleInput(input_layouts=(_SEQUENCE, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=_SEQUENCE),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=_SEQUENCE),
        "feed_forward.w3": ColwiseParallel(),
    }


def _waited(_module: nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return a copy of the embedding's output, which waits for the collective that writes the output.

    Torch 2.13 loses the gradient of a compiled block's input that a collective has not written yet.
    """
    return output.clone()
