"""FSDP2 settings that are the same in every FSDP2 workload."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients: the loss is divided by the global count already, and gloo has no average."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prefetch(units: list[FSDPModule], num_forward: int, num_backward: int) -> None:
    """Have each unit start the all-gathers of the next units; 0 keeps FSDP2's own order."""
    for number, unit in enumerate(units):
        if num_forward:
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + num_forward])
        if num_backward:
            unit.set_modules_to_backward_prefetch(units[max(0, number - num_backward) : number][::-1])
