"""One training step: the order in which transfers and GEMMs are submitted, and the waits between them."""

import torch

from ..common.collectives import all_gather, reduce_scatter
from ..common.streams import DeviceStream, InlineStream, Prefetcher, Transfer, Work, collective_stream
from .buffers import Buffers
from .oracle import INPUT_SLOTS, CodeTable, Contribution
from .settings import Settings
from .verification import Verification


class TrainingStep:
    """The steps on the current stream; warm-up, checked and measured steps differ only in the checks.

    On CUDA the host never waits. Buffers in pairs alternate: inputs by iteration, gathered parameters by gather (each
    step has an even number of gathers), gradients by turn within a step.
    """

    def __init__(self, settings: Settings, buffers: Buffers, codes: CodeTable, verification: Verification) -> None:
        """Prepare the streams; nothing is submitted before the first :meth:`run`."""
        self._settings, self._buffers, self._codes = settings, buffers, codes
        self._verification = verification
        device = buffers.index.device
        self._contribution = Contribution(settings.world_size, settings.rank, settings.dtype, device)
        on_stream = settings.h2d_prefetch and device.type == "cuda"
        inputs = DeviceStream(device) if on_stream else InlineStream()
        self._inputs = Prefetcher(inputs, int(settings.h2d_prefetch), self._input_copy)
        self._collectives = collective_stream(device, beside=settings.comm_stream)
        self._gathers = Prefetcher(
            self._collectives,
            int(settings.comm_stream),
            self._gather,
            in_line=lambda number: self.runs_in_line(self._layer_of_gather(number)),
        )

    def run(self, iteration: int) -> None:
        """Run step ``iteration`` of the run; iterations start at 0 and are consecutive."""
        self._inputs.take(iteration, last=iteration + 1)
        self._verification.check_input(iteration, self._buffers.inputs[iteration % 2])
        for layer, shard in enumerate(self._buffers.shards):
            # Stands for the optimizer: every iteration has parameters of its own.
            self._codes.write(shard, self._buffers.own_index, iteration, layer)
        self._forward(iteration)
        self._backward(iteration)
        self._apply_gradients(iteration)

    def end(self) -> None:
        """Complete the weights after the last step."""

    def runs_in_line(self, layer: int) -> bool:  # noqa: ARG002
        """Return whether compute waits for the layer's collectives as soon as they are submitted."""
        return False

    def input_slot(self, iteration: int) -> int:
        """Return the slot of the host's input that is copied to the device."""
        return iteration % INPUT_SLOTS

    def gathered(self, iteration: int, layer: int, phase: str) -> torch.Tensor:
        """Wait for the layer's parameters and return them, one row per source rank."""
        turn = layer if phase == "forward" else 2 * self._settings.layers - 1 - layer
        begin = 2 * self._settings.layers * iteration
        # Not beyond this step, since the parameters of the next step are not written yet.
        self._gathers.take(begin + turn, last=begin + 2 * self._settings.layers - 1)
        return self._buffers.gathered[turn % 2]

    def gradient(self, iteration: int, layer: int) -> torch.Tensor:
        """Return this rank's contribution to the layer's gradient."""
        gradient = self._buffers.gradients[(self._settings.layers - 1 - layer) % 2]
        self._codes.write(gradient, self._buffers.index, iteration, layer)
        self._contribution.keep_own(gradient, iteration)
        return gradient

    def reduced(self, iteration: int, layer: int) -> torch.Tensor:  # noqa: ARG002
        """Return this rank's shard of the layer's summed gradient, which has arrived."""
        return self._buffers.reduced[layer]

    def _forward(self, iteration: int) -> None:
        gemm = self._buffers.gemm
        for layer in range(self._settings.layers):
            self._use_parameters(iteration, layer, "forward")
            torch.mm(gemm.activation, gemm.weight, out=gemm.output)

    def _backward(self, iteration: int) -> None:
        gemm = self._buffers.gemm
        scatters: list[Work] = []
        for turn, layer in enumerate(reversed(range(self._settings.layers))):
            self._use_parameters(iteration, layer, "backward")
            torch.mm(gemm.output, gemm.weight.t(), out=gemm.activation_gradient)
            torch.mm(gemm.activation.t(), gemm.output, out=gemm.weight_gradient)
            if turn >= 2:
                # This reduce-scatter reads the buffer that is written next.
                scatters[turn - 2].wait()
            scatters.append(self._collectives.submit(self._scatter(layer, self.gradient(iteration, layer))))
            if self.runs_in_line(layer):
                scatters[-1].wait()
        for work in scatters[-2:]:
            work.wait()

    def _use_parameters(self, iteration: int, layer: int, phase: str) -> None:
        self._verification.check_gathered(iteration, layer, phase, self.gathered(iteration, layer, phase))

    def _apply_gradients(self, iteration: int) -> None:
        for layer in range(self._settings.layers):
            self._verification.check_reduced(iteration, layer, self.reduced(iteration, layer))
        # Without an optimizer there are no weights.
        for weights, reduced in zip(self._buffers.weights, self._buffers.reduced, strict=False):
            weights.sub_(reduced)

    def _input_copy(self, iteration: int) -> Transfer:
        slot = self.input_slot(iteration)

        def copy(_asynchronous: bool) -> None:
            self._buffers.inputs[iteration % 2].copy_(self._buffers.host_inputs[slot], non_blocking=True)

        return copy

    def _gather(self, number: int) -> Transfer:
        out, shard = self._buffers.gathered[number % 2].view(-1), self._buffers.shards[self._layer_of_gather(number)]
        return lambda asynchronous: all_gather(out, shard, async_op=asynchronous)

    def _layer_of_gather(self, number: int) -> int:
        turn = number % (2 * self._settings.layers)
        return min(turn, 2 * self._settings.layers - 1 - turn)

    def _scatter(self, layer: int, gradient: torch.Tensor) -> Transfer:
        out = self._buffers.reduced[layer]
        return lambda asynchronous: reduce_scatter(out, gradient, async_op=asynchronous)
