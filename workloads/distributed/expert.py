"""Expert parallelism: each rank holds a part of the experts, and ranks exchange tokens (arXiv 2006.16668)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..common.gradients import own_shard
from ..common.torch_private import functional_collectives
from ..models.common.dtensors import distribute_parameter
from ..models.common.moe import Dispatched, Experts, MoeFeedForward, TokenDispatcher, group_rows
from .parallel_dims import ParallelMesh

# The hidden dimension of each stacked matrix.
_HIDDEN = {"w1": 1, "w2": 2, "w3": 1}


def split_experts(model: nn.Module, mesh: DeviceMesh, *, distributed: bool, tensor_parallel: bool) -> None:
    """Keep on each rank of ``mesh`` its part of the experts.

    The first dimension of ``mesh`` distributes the experts if ``distributed``, and the last one splits the hidden
    dimension of each expert if ``tensor_parallel``.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            for name, hidden in _HIDDEN.items():
                placements = [Shard(0)] * distributed + [Shard(hidden)] * tensor_parallel
                distribute_parameter(module, name, mesh, placements)


def dispatch_tokens(model: nn.Module, mesh: DeviceMesh, *, evenly: bool) -> None:
    """Make the ranks of the one-dimensional ``mesh``, which distributes experts, exchange tokens.

    ``evenly`` is for tensors without data, whose router scores do not say how many tokens ranks exchange.
    """
    dispatcher = EvenDispatcher if evenly else AllToAllDispatcher
    for module in model.modules():
        if isinstance(module, MoeFeedForward):
            module.dispatcher = dispatcher(mesh.get_group(), mesh.size())


@torch.no_grad()
def balance_experts(model: nn.Module, mesh: ParallelMesh, coefficient: float) -> None:
    """Update the experts' biases by the tokens of a step on all ranks (arXiv 2408.15664, algorithm 1); collective.

    The bias of an expert with fewer tokens than the mean of its block rises by ``coefficient``, that of an expert with
    more falls.
    """
    blocks = [module for module in model.modules() if isinstance(module, MoeFeedForward)]
    if not blocks:
        return
    counts = torch.stack([block.tokens_per_expert for block in blocks])
    for axis in (mesh.shards, mesh.replicas):
        if axis is not None and axis.size() > 1:
            dist.all_reduce(counts, group=axis.get_group())
    for block, tokens in zip(blocks, counts, strict=True):
        # The mean times the number of experts is an integer.
        block.get_buffer("expert_bias").add_(coefficient * torch.sign(tokens.sum() - tokens * len(tokens)))
        block.tokens_per_expert.zero_()


class AllToAllDispatcher(TokenDispatcher):
    """Evaluates each row on the rank of its expert: all-to-all collectives send rows there and outputs back."""

    def __init__(self, group: dist.ProcessGroup, num_ranks: int) -> None:
        self._group, self._num_ranks = group, num_ranks

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> Dispatched:
        """Send each of ``rows`` to the rank of its expert."""
        # Rows from each rank for each expert of this rank.
        received = self._exchange_counts(counts).view(self._num_ranks, -1)
        sent = counts.view(self._num_ranks, -1)
        num_sent, num_received = self._num_rows(sent, received, len(rows))
        own = self._exchange(rows, num_sent, num_received)
        # The number of each received row's expert on this rank.
        numbers = torch.arange(received.shape[1], device=received.device).repeat(self._num_ranks)
        experts = numbers.repeat_interleave(received.flatten(), output_size=sum(num_received))
        groups = group_rows(experts, received.shape[1])
        return Dispatched(own[groups.order], groups.counts, groups.inverse, num_sent, num_received)

    def combine(self, out: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Send outputs back to the ranks of their rows."""
        return self._exchange(out[dispatched.order], dispatched.num_received, dispatched.num_sent)

    def _num_rows(self, sent: torch.Tensor, received: torch.Tensor, _: int) -> tuple[list[int], list[int]]:
        """Return how many rows go to each rank and how many come from each, on the host for the collectives."""
        num_sent, num_received = torch.stack([sent, received]).sum(dim=2).tolist()
        return num_sent, num_received

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = functional_collectives.all_to_all_single(counts, None, None, self._group)
        return received

    def _exchange(self, rows: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> torch.Tensor:
        """Send each rank its part of ``rows``, in the order of ranks; gradients go back the same way."""
        exchange = functional_collectives.all_to_all_single_autograd
        out: torch.Tensor = exchange(rows, list(num_received), list(num_sent), self._group)
        return out


class EvenDispatcher(AllToAllDispatcher):
    """A dispatcher of counts of rows without data: all ranks send and receive alike."""

    def _num_rows(self, sent: torch.Tensor, received: torch.Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        del sent, received
        ends = [num_rows * rank // self._num_ranks for rank in range(self._num_ranks + 1)]
        even = [end - begin for begin, end in pairwise(ends)]
        return even, even


def expert_placement(experts: Experts, mesh: DeviceMesh) -> Shard:
    """Return the placement with which data parallelism shards a rank's experts over the last axis of ``mesh``.

    Experts are sharded along their number or, if ranks do not divide it evenly, along the next dimension; some ranks
    would otherwise hold no expert.
    """
    num_shards = mesh.size(mesh.ndim - 1)
    shapes = [own_shard(weight).shape for weight in experts.parameters()]
    dims = [dim for dim in (0, 1) if all(shape[dim] % num_shards == 0 for shape in shapes)]
    # FSDP2 pads only dimension 0, so uneven shards have to be along it.
    return Shard(dims[0] if dims else 0)
