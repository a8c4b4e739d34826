"""What every FSDP2 workload tells FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Reduce gradients by a plain sum: the loss has the global count in it, and gloo has no average."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prefetch(units: list[FSDPModule], num_forward: int, num_backward: int) -> None:
    """Have each unit gather the next ones' parameters when its own are there; 0 leaves FSDP2's own order."""
    for number, unit in enumerate(units):
        if num_forward:
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + num_forward])
        if num_backward:
            unit.set_modules_to_backward_prefetch(units[max(0, number - num_backward) : number][::-1])
