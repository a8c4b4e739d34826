"""AdamW, by torch's kernels or by one compiled kernel for each parameter, which applies the factor of clipping too."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .gradients import by_mesh, own_shard
from .torch_private import foreach_add_


def make_adamw(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, kind: str = "fused"
) -> torch.optim.AdamW:
    """Return AdamW for the parameters of ``model``, as one ``fused`` kernel, as many, or ``compiled``."""
    # Each mesh has a group of its own, because a kernel for many tensors accepts tensors of one mesh only.
    groups = [{"params": parameters} for parameters in by_mesh(model)]
    if kind == "compiled":
        return CompiledAdamW(groups, lr, betas, weight_decay=weight_decay)
    fused = kind == "fused"
    # On CPU the other kernels take square roots from MKL, which rounds them differently on another vendor's CPU.
    foreach = None if not fused and any(parameter.is_cuda for parameter in model.parameters()) else False
    return torch.optim.AdamW(groups, lr, betas, weight_decay=weight_decay, fused=fused, foreach=foreach)


class CompiledAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) that reads each gradient once and writes none; it rounds differently than torch's.

    State and parameter groups are those of ``torch.optim.AdamW``, so that one loads the checkpoints of the other.

    Attributes:
        gradient_factor: the factor of all gradients in the steps from here on, as a tensor of one element; None: 1.
    """

    gradient_factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        if not states:
            return
        foreach_add_([state["step"] for state in states], 1)
        # All parameters of a group have gradients in every step, or in none.
        number = float(states[0]["step"])
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        corrections = 1 - beta1**number, (1 - beta2**number) ** 0.5
        scalars = [1 - beta1, beta2, 1 - lr * group["weight_decay"], lr / corrections[0], corrections[1], group["eps"]]
        # Floats would be constants of the kernel, which a learning rate that changes would compile anew.
        numbers = [torch.tensor(scalar) for scalar in scalars]
        for parameter, state in zip(parameters, states, strict=True):
            local = [_flat(tensor) for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
            if local[0].numel():
                factor = self.gradient_factor
                _kernel()(*local, local[0].new_ones(()) if factor is None else factor, *numbers)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of a tensor in one dimension, so that one kernel is compiled for all shapes."""
    assert tensor is not None
    return own_shard(tensor.detach()).view(-1)


@functools.cache
def _kernel() -> Callable[..., None]:
    # Compiled on first use, since torch.compile imports the compiler.
    return torch.compile(_update, fullgraph=True, dynamic=True)


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square_average: torch.Tensor,
    factor: torch.Tensor,
    new_weight: torch.Tensor,
    square_decay: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    correction: torch.Tensor,
    eps: torch.Tensor,
) -> None:
    gradient = gradient * factor
    average.add_((gradient - average) * new_weight)
    square_average.mul_(square_decay).add_(gradient * gradient * (1 - square_decay))
    parameter.mul_(decay).sub_(rate * average / (square_average.sqrt() / correction + eps))
