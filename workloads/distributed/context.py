"""Context parallelism: ranks share each sequence and gather the keys and values of all of it.

The method is that of Llama 3 (arXiv 2407.21783, section 3.3.2). Torch's own ring attention patches a function of torch
and has no kernel for CPU ranks.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..models.common.attention import SDPA
from ..models.common.decoder import Attention, Decoder

_SEQUENCE_DIM = 2


def own_positions(seq_len: int, num_ranks: int, rank: int) -> torch.Tensor:
    """Return the positions of a sequence that a rank computes, int64 ``[seq_len / num_ranks]``.

    Each rank takes one chunk from the front and its counterpart from the back, so that under a causal mask all ranks
    score the same number of pairs.
    """
    if num_ranks == 1:
        return torch.arange(seq_len)
    chunks = torch.arange(seq_len).chunk(2 * num_ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def key_lengths(seq_len: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """Return how many keys each of a rank's chunks of queries attends to: those up to and including its last query."""
    if num_ranks == 1:
        return (seq_len,)
    length = seq_len // (2 * num_ranks)
    return (rank + 1) * length, (2 * num_ranks - rank) * length


def apply_context_parallel(model: Decoder, mesh: DeviceMesh, seq_len: int) -> None:
    """Make each block attend to keys and values of all ranks of the one-dimensional ``mesh``."""
    attend = GatheredAttention(mesh, seq_len, SDPA(model.config.attention))
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend


class GatheredAttention:
    """Causal attention of this rank's queries, at :func:`own_positions`, to keys and values gathered from all ranks."""

    def __init__(self, mesh: DeviceMesh, seq_len: int, attend: SDPA) -> None:
        self._mesh, self._attend = mesh, attend
        self._num_keys = key_lengths(seq_len, mesh.size(), mesh.get_local_rank())
        self._masks = [attend.mask(seq_len // (2 * mesh.size()), num_keys) for num_keys in self._num_keys]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend; all tensors are ``[batch, heads, positions of this rank, head_dim]``."""
        k, v = self._gathered(k), self._gathered(v)
        attended = [
            self._attend(queries, k.narrow(_SEQUENCE_DIM, 0, num_keys), v.narrow(_SEQUENCE_DIM, 0, num_keys), mask)
            for queries, num_keys, mask in zip(q.chunk(2, _SEQUENCE_DIM), self._num_keys, self._masks, strict=True)
        ]
        return torch.cat(attended, _SEQUENCE_DIM)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks, in the order of positions."""
        chunks = self._all_gather(tensor).chunk(2 * self._mesh.size(), _SEQUENCE_DIM)
        # The gathered chunks are in the order of ranks, each with a chunk from the front and one from the back.
        return torch.cat([*chunks[::2], *chunks[::-2]], _SEQUENCE_DIM)

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks, in the order of ranks; gradients are summed over ranks."""
        whole = DTensor.from_local(tensor, self._mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])
