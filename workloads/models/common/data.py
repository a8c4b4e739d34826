"""Initial weights and tokens, each drawn from a generator of its own, so that they do not depend on the layout."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ...common.seeding import generator

_STD = 0.02
# The products of these matrices add to the residual stream, twice per block, so the matrices are scaled down as in
# GPT-2.
_RESIDUAL_SUFFIXES = (
    "attention.wo.weight",
    "feed_forward.w2.weight",
    "feed_forward.experts.w2",
    "feed_forward.shared_experts.w2.weight",
)


def initial_value(name: str, like: torch.Tensor, n_layers: int, seed: int) -> torch.Tensor:
    """Return the full value of the parameter ``name``, on the device of ``like``.

    Weights of norms are 1. Other weights are normal with a standard deviation of 0.02, which is divided by ``sqrt(2 *
    n_layers)`` for the matrices that add to the residual stream.
    """
    if name.endswith("norm.weight"):
        return torch.ones(like.shape, dtype=like.dtype, device=like.device)
    std = _STD / math.sqrt(2 * n_layers) if name.endswith(_RESIDUAL_SUFFIXES) else _STD
    random = generator(like.device, "weight", seed, name)
    return torch.randn(like.shape, generator=random, dtype=like.dtype, device=like.device) * std


@torch.no_grad()
def initialize(model: nn.Module, n_layers: int, seed: int) -> None:
    """Fill every parameter, one at a time: each rank makes the full value and keeps its own shard; buffers are zero."""
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter, n_layers, seed)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(local_part(value, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(value)


def local_part(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's part of a tensor that is split along inner axes first.

    Data parallelism, on the outer axes, shards the parts that the other axes leave. This is the order of
    ``_StridedShard``.
    """
    for axis, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        # As torch.chunk divides, which makes a tensor for each of many ranks. The last ranks have less, or nothing.
        num_rows = value.shape[dim]
        each = -(-num_rows // mesh.size(axis))
        begin = min(each * mesh.get_local_rank(axis), num_rows)
        value = value.narrow(dim, begin, min(each, num_rows - begin))
    return value


def sequences(seed: int, step: int, indices: Sequence[int], seq_len: int, vocab_size: int) -> torch.Tensor:
    """Draw token ids ``[sequence, seq_len + 1]`` on the CPU: inputs, and labels shifted by one.

    A sequence depends only on ``seed``, ``step`` and its global index within the step, so a global batch is the same
    for every number of ranks and micro-batches.
    """
    drawn_from = (generator(torch.device("cpu"), "tokens", seed, step, index) for index in indices)
    return torch.stack([torch.randint(vocab_size, (seq_len + 1,), generator=random) for random in drawn_from])
