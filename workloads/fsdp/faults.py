"""Faults that tests plant in the data, never in the checks, to prove that the checks find and name each of them."""

import time

import torch

from pytest_aorta.worker import Delay

from .buffers import Buffers
from .oracle import CodeTable
from .schedule import TrainingStep
from .settings import GATHER_KINDS, Settings
from .verification import Verification


class FaultyStep(TrainingStep):
    """Steps with the fault that the config asks for."""

    def __init__(self, settings: Settings, buffers: Buffers, codes: CodeTable, verification: Verification) -> None:
        """Prepare the streams and the fault, whose iteration 0 is the first that is checked."""
        super().__init__(settings, buffers, codes, verification)
        spec = self._spec = settings.fault
        self._here = spec.rank in (None, settings.rank)
        self._iteration = settings.warmup + spec.iteration
        self._chunks = buffers.index.view(settings.world_size, -1)
        self._delay = Delay(buffers.index.device, spec.delay_ms)

    def run(self, iteration: int) -> None:
        """Run step ``iteration``, and be late by fault."""
        super().run(iteration)
        if self._here and iteration % self._spec.every == 0:
            if self._spec.kind == "slowdown":
                self._delay()
            elif self._spec.kind == "late_host":
                time.sleep(self._spec.delay_ms / 1e3)

    def runs_in_line(self, layer: int) -> bool:
        """Return whether compute waits for the layer's collectives as soon as they are submitted."""
        return self._spec.kind == "in_line" and self._here and self._spec.layer in (None, layer)

    def input_slot(self, iteration: int) -> int:
        """Return the slot of the host's input that is copied to the device."""
        is_stale = self._spec.kind == "stale_h2d" and self._here and iteration == self._iteration
        return super().input_slot(iteration - is_stale)

    def gathered(self, iteration: int, layer: int, phase: str) -> torch.Tensor:
        """Wait for the layer's parameters and damage those of one source rank."""
        chunks, spec = super().gathered(iteration, layer, phase), self._spec
        if spec.kind not in GATHER_KINDS or spec.phase != phase or not self._strikes(iteration, layer):
            return chunks
        chunk = chunks[spec.source_rank]
        if spec.kind == "zeroed_gather":
            chunk.zero_()
        elif spec.kind == "permuted_gather":
            chunk[:2] = chunk[:2].flip(0)
        elif spec.kind == "swapped_shards":
            pair = [spec.source_rank, (spec.source_rank + 1) % len(chunks)]
            chunks[pair[0]], chunks[pair[1]] = chunks[pair[1]].clone(), chunks[pair[0]].clone()
        else:
            begin = len(chunk) // 2 if spec.kind == "partial_gather" else 0
            stale = torch.empty_like(chunk)
            self._codes.write(stale, self._chunks[spec.source_rank], iteration - 1, layer)
            chunk[begin:] = stale[begin:]
        return chunks

    def gradient(self, iteration: int, layer: int) -> torch.Tensor:
        """Return this rank's contribution to the layer's gradient; none if the fault drops it."""
        gradient = super().gradient(iteration, layer)
        if self._spec.kind == "dropped_gradient" and self._strikes(iteration, layer):
            gradient.zero_()
        return gradient

    def reduced(self, iteration: int, layer: int) -> torch.Tensor:
        """Return this rank's shard of the layer's summed gradient, by fault that of the iteration before."""
        reduced = super().reduced(iteration, layer)
        if self._spec.kind == "stale_gradient" and self._strikes(iteration, layer):
            self._codes.write(reduced, self._chunks[self._settings.rank], iteration - 1, layer)
        return reduced

    def end(self) -> None:
        """Change one float32 weight of this rank by one unit in the last place."""
        if self._spec.kind == "weight" and self._here:
            self._buffers.weights[self._spec.layer or 0].view(torch.int32)[-1:].add_(1)

    def _strikes(self, iteration: int, layer: int) -> bool:
        return self._here and iteration == self._iteration and layer == self._spec.layer
