"""Excludes from spans of compute the time in which FSDP2 makes compute wait for parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_aorta.worker import StreamSpans


def hold_during_waits(unit: nn.Module, spans: StreamSpans) -> None:
    """Hold ``spans`` while FSDP2's hooks of ``unit``, a sharded module, run; call this once per unit.

    The hooks gather parameters in forward and in backward, and reduce gradients after the unit's last one. Compute
    then resumes with the next unit's backward pass, or in the caller of backward. FSDP2's copies into and out of its
    buffers are excluded together with the waits.
    """

    @_untraced
    def before_gather(_unit: nn.Module, _args: Any) -> None:
        spans.hold()

    @_untraced
    def after_gather(unit: nn.Module, _args: Any) -> None:
        if not spans.is_recording:
            return
        spans.resume()
        _hold_after_last_gradient(list(unit.parameters()), spans)

    # Autograd calls a tensor's hooks in the order of registration: FSDP2's hook, which gathers in backward, lies
    # between the two registered here.
    @_untraced
    def before_gather_in_backward(_unit: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if spans.is_recording:
            output.register_hook(lambda _: spans.hold())

    @_untraced
    def after_gather_in_backward(_unit: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if spans.is_recording:
            output.register_hook(lambda _: spans.resume())

    unit.register_forward_pre_hook(before_gather, prepend=True)
    unit.register_forward_pre_hook(after_gather)
    unit.register_forward_hook(before_gather_in_backward, prepend=True)
    unit.register_forward_hook(after_gather_in_backward)


def _hold_after_last_gradient(parameters: list[nn.Parameter], spans: StreamSpans) -> None:
    """Hold ``spans`` after the last gradient of the next backward pass, and of that pass only."""
    num_missing = len(parameters)

    # A multi-grad hook would keep references to gradients, and autograd would then copy them.
    def count(_parameter: torch.Tensor) -> None:
        nonlocal num_missing
        num_missing -= 1
        if not num_missing:
            for handle in handles:
                handle.remove()
            spans.hold()

    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook`` hidden from dynamo, which would otherwise trace the hooks of a module compiled in place."""
    untraced: Callable[..., None] = torch.compiler.disable(hook)
    return untraced
