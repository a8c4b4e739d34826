"""Tells spans of compute from where FSDP2 has the training stream wait for a unit's parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_aorta.worker import StreamSpans


def hold_where_it_waits(unit: nn.Module, spans: StreamSpans) -> None:
    """Hold ``spans`` while FSDP2's hooks of ``unit``, which is sharded already, run; call it once.

    In forward these gather its parameters, in backward too; after its last gradient they reduce them, and compute
    resumes with the next unit's backward, or where backward is called. FSDP2's copies into and out of its buffers are
    held with the waits.
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

    # A tensor's hooks are called in the order of registration: FSDP2's, which gathers in backward, is in between.
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
    """Of the next backward pass alone, although gathered parameters are the same objects in every step."""
    num_missing = len(parameters)

    # A multi-grad hook would keep gradients, so that autograd had to copy them.
    def count(_parameter: torch.Tensor) -> None:
        nonlocal num_missing
        num_missing -= 1
        if not num_missing:
            for handle in handles:
                handle.remove()
            spans.hold()

    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Hooks of a module that is compiled in place run where dynamo would trace them too."""
    untraced: Callable[..., None] = torch.compiler.disable(hook)
    return untraced
