"""Parameters and values that all ranks of tensor parallelism hold, or a part of each."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

# Activations between attention and feed-forward are [batch, sequence, dim], split along the sequence.
SEQUENCE = Shard(1)


def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's copy of a replicated DTensor; other tensors are returned as they are.

    Each rank computes a part of what follows from the copy, so that the gradient is the sum of all ranks' gradients.
    """
    return tensor.to_local(grad_placements=[Partial("sum")]) if isinstance(tensor, DTensor) else tensor


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Make a parameter of ``module``, which is on the meta device, a DTensor on ``mesh``."""
    # There is no data to send on the meta device.
    own = distribute_tensor(module.get_parameter(name), mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(own))


class Distributed(ParallelStyle):
    """Gives the parameters of a module their placements; inputs and outputs stay as they are."""

    def __init__(self, **placements: Placement) -> None:
        super().__init__()
        self._placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            distribute_parameter(module, name, device_mesh, [placement])
        return module
