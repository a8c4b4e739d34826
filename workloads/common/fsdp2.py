"""FSDP2 settings that are the same in every FSDP2 workload, and replacements of its collectives."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .collectives import Collective


@dataclass(frozen=True)
class CustomCollective:
    """A replacement for a collective of FSDP2; FSDP2's own base class for replacements is in a private module.

    Attributes:
        run: takes the tensor to write, the tensor to read, and FSDP2's keywords.
        memory: the context in which buffers are allocated.
    """

    run: Collective
    memory: Callable[[], AbstractContextManager[object]] = nullcontext

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer to send from or receive into."""
        with self.memory():
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **given: Any) -> dist.Work | None:
        """Run the collective."""
        return self.run(output_tensor, input_tensor, **given)


def sum_gradients(model: nn.Module, num_ranks: int) -> None:
    """Have FSDP2 sum gradients: the loss is divided by the global count already, and gloo has no average.

    A single rank has nothing to sum, and with a factor FSDP2 would divide its gradients by 1 in a pass of its own.
    """
    if num_ranks == 1:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prefetch(units: list[list[FSDPModule]], num_forward: int, num_backward: int) -> None:
    """Have each unit start the all-gathers of the next units; 0 keeps FSDP2's own order.

    Each unit is a list of the modules that are gathered together, beginning with the one that runs first.
    """
    for number, (first, *_) in enumerate(units):
        if num_forward:
            first.set_modules_to_forward_prefetch([*chain(*units[number : number + 1 + num_forward])][1:])
        if num_backward:
            first.set_modules_to_backward_prefetch([*chain(*units[max(0, number - num_backward) : number][::-1])])
