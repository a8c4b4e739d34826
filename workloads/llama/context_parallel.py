"""Context parallelism: ranks share each sequence, and gather keys and values of all of it (arXiv 2407.21783, 3.3.2).

Torch's own ring attention replaces a function of torch's, and has no kernel for CPU ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right

from .model import Attention, Llama

_SEQUENCE_DIM = 2


def own_positions(seq_len: int, num_ranks: int, rank: int) -> torch.Tensor:
    """The positions of a sequence that a rank computes, int64 ``[seq_len / num_ranks]``.

    They are one chunk from the front and its counterpart from the back: under a causal mask all ranks then have the
    same number of pairs to score.

    Raises:
        ValueError: the sequence does not fall into two equal chunks for each rank.
    """
    if num_ranks == 1:
        return torch.arange(seq_len)
    if seq_len % (2 * num_ranks):
        raise ValueError(
            f"seq_len is {seq_len}, no multiple of 2 x context_parallel_degree {num_ranks}: each rank takes two chunks"
        )
    chunks = torch.arange(seq_len).chunk(2 * num_ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def apply_context_parallel(model: Llama, mesh: DeviceMesh, seq_len: int) -> None:
    """Have each block attend to keys and values of all ranks of the one-dimensional ``mesh``."""
    attend = GatheredAttention(mesh, seq_len)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend


class GatheredAttention:
    """Causal attention of this rank's queries, at :func:`own_positions`, to keys and values gathered from all ranks."""

    def __init__(self, mesh: DeviceMesh, seq_len: int) -> None:
        self._mesh = mesh
        length, rank = seq_len // (2 * mesh.size()), mesh.get_local_rank()
        # A chunk of queries sees keys up to and with its own, the last of which is the last query's.
        self._seen = [(number + 1) * length for number in (rank, 2 * mesh.size() - 1 - rank)]
        self._masks = [causal_lower_right(length, seen) for seen in self._seen]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend; all are ``[batch, heads, positions of this rank, head_dim]``."""
        k, v = self._gathered(k), self._gathered(v)
        attended = [
            F.scaled_dot_product_attention(
                queries,
                k.narrow(_SEQUENCE_DIM, 0, seen),
                v.narrow(_SEQUENCE_DIM, 0, seen),
                attn_mask=mask,
                enable_gqa=True,
            )
            for queries, seen, mask in zip(q.chunk(2, _SEQUENCE_DIM), self._seen, self._masks, strict=True)
        ]
        return torch.cat(attended, _SEQUENCE_DIM)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' part, in the order of positions."""
        chunks = self._all_gather(tensor).chunk(2 * self._mesh.size(), _SEQUENCE_DIM)
        # Rank after rank, each has a chunk from the front and one from the back.
        return torch.cat([*chunks[::2], *chunks[::-2]], _SEQUENCE_DIM)

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' part, rank after rank; gradients are summed over ranks."""
        whole = DTensor.from_local(tensor, self._mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])
