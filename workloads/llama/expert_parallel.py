"""Expert parallelism: ranks hold some experts each, and exchange the tokens that go to them (arXiv 2006.16668)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from .experts import Experts, MoeFeedForward, group_rows, local_experts
from .mesh import Degrees

# What torch's grouped matrix products ask of every stride.
_STRIDE_BYTES = 16
_BYTES = {"float32": 4, "bfloat16": 2}


def check_experts(config: Mapping[str, Any], degrees: Degrees) -> None:
    """See that the config's experts can be had under its axes.

    Raises:
        ValueError: a combination that can't run; the message names the keys.
    """
    num_experts, per_token, degree = config["num_experts"], config["experts_per_token"], degrees.expert_parallel
    if not num_experts:
        if degree > 1:
            raise ValueError(f"expert_parallel_degree is {degree} and num_experts is 0: there are none to share out")
        return
    if per_token > num_experts:
        raise ValueError(f"experts_per_token is {per_token}, allowed is up to num_experts {num_experts}")
    if num_experts % degree:
        raise ValueError(f"num_experts is {num_experts}, no multiple of expert_parallel_degree {degree}")
    _check_combinations(config, degrees)
    multiple = _STRIDE_BYTES // _BYTES[config["param_dtype"]]
    if odd := {key: config[key] for key in ("dim", "ffn_hidden") if config[key] % multiple}:
        raise ValueError(
            f"num_experts is {num_experts}, and in {config['param_dtype']} experts take multiples of {multiple}: "
            f"{odd} are none"
        )


def _check_combinations(config: Mapping[str, Any], degrees: Degrees) -> None:
    num_experts = config["num_experts"]
    if degrees.tensor_parallel > 1:
        raise ValueError(
            f"num_experts is {num_experts} and tensor_parallel_degree is {degrees.tensor_parallel}: matrices of "
            f"experts are not split; allowed is one of the two"
        )
    if config["float8_linear"]:
        raise ValueError(
            f"num_experts is {num_experts} and float8_linear is true: experts are no linear layers, and a rounded "
            f"router would choose others; allowed is one of the two"
        )
    if degrees.expert_parallel > 1 and config.get("compile_blocks"):
        raise ValueError(
            f"expert_parallel_degree is {degrees.expert_parallel} and compile_blocks is true: how many tokens ranks "
            f"exchange is read on the host, which ends a graph; allowed is one of the two"
        )


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of the one-dimensional ``mesh`` its experts, and have tokens exchanged."""
    for module in model.modules():
        if isinstance(module, MoeFeedForward):
            for name, parameter in list(module.experts.named_parameters()):
                # Nothing to send: the model is on the meta device.
                own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                module.experts.register_parameter(name, nn.Parameter(own))
            module.evaluate = ExchangedExperts(mesh)


class ExchangedExperts:
    """Evaluates experts where they are: rows go to their ranks and outputs come back, all to all."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._num_ranks = mesh.get_group(), mesh.size()

    def __call__(self, experts: Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Put ``rows``, in the order of all experts, each of which has ``counts`` of them, through their experts."""
        # Of each rank, how many rows are for each expert of this one.
        received = self._exchange_counts(counts).view(self._num_ranks, -1)
        sent = counts.view(self._num_ranks, -1)
        # On the host, where collectives take the sizes of their parts.
        num_sent, num_received = torch.stack([sent, received]).sum(dim=2).tolist()
        own = self._exchange(rows, num_sent, num_received)
        groups = group_rows(_expert_of_rows(received, sum(num_received)), received.shape[1])
        out = experts(own[groups.order], groups.counts)[groups.inverse]
        return self._exchange(out, num_received, num_sent)

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        return received

    def _exchange(self, rows: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
        """Send each rank its share of ``rows``, in the order of ranks; gradients go back the same way."""
        out: torch.Tensor = all_to_all_single_autograd(rows, num_received, num_sent, self._group)
        return out


def _expert_of_rows(received: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The number of each received row's expert on this rank, from the counts ``[rank, expert]`` in that order."""
    num_ranks, num_experts = received.shape
    numbers = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    return numbers.repeat_interleave(received.flatten(), output_size=num_rows)


def expert_placement(experts: Experts, mesh: DeviceMesh) -> Shard:
    """Along which dim data parallelism shards the experts that a rank has, over the last axis of ``mesh``.

    That of experts, or where they don't divide evenly the next one: ranks would otherwise hold none.
    """
    num_shards = mesh.size(mesh.ndim - 1)
    shapes = [local_experts(weight).shape for weight in experts.parameters()]
    dims = [dim for dim in (0, 1) if all(shape[dim] % num_shards == 0 for shape in shapes)]
    # FSDP2 pads dim 0 alone.
    return Shard(dims[0] if dims else 0)
