"""Gradients of replicated modules, summed over ranks beside the rest of backward or after backward."""

import torch
import torch.distributed as dist
from torch import nn

from ..common.gradients import fill_gradients
from ..common.streams import InlineStream, Stream, Work


class GradientSum:
    """An all-reduce of a module's gradients, as one message, started when backward has made the last of them.

    Without a stream, :meth:`finish` runs the all-reduce in line.
    """

    def __init__(self, module: nn.Module, stream: Stream | None) -> None:
        """Hook every parameter of ``module``; each backward pass must use all of them."""
        self._parameters = list(module.parameters())
        self._stream = stream
        self._num_ready = 0
        self._flat: torch.Tensor | None = None
        self._work: Work | None = None
        self.enabled = True
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def finish(self) -> None:
        """Copy the sums into the gradients, for compute that follows."""
        if self._stream is None:
            self._start(InlineStream())
        if self._flat is None or self._work is None:
            raise RuntimeError("gradients of a replicated module were not summed: backward has not made all of them")
        self._work.wait()
        fill_gradients(self._parameters, self._flat)
        self._flat = self._work = None

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        self._num_ready = (self._num_ready + 1) % len(self._parameters)
        if self._stream is not None and self.enabled and not self._num_ready:
            self._start(self._stream)

    def _start(self, stream: Stream) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flat = self._flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._work = stream.submit(lambda asynchronous: dist.all_reduce(flat, async_op=asynchronous))
