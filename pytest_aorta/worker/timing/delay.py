"""Extra work of a known duration, to plant a real slowdown: a kernel on an accelerator, a busy loop on CPU."""

from __future__ import annotations

import time

import torch

from pytest_aorta.worker.accelerator import cycles_per_ms, on_accelerator, spin


class Delay:
    """A callable that occupies the current stream, or the CPU rank, for ``delay_ms`` milliseconds."""

    def __init__(self, device: torch.device, delay_ms: float) -> None:
        """Calibrate the delay; on an accelerator this waits for the device."""
        self._device, self._delay_ms = device, delay_ms
        if delay_ms and on_accelerator(device):
            cycles_per_ms(device)

    def __call__(self) -> None:
        """Occupy the stream or the rank once; on an accelerator the host does not wait."""
        if on_accelerator(self._device):
            spin(self._delay_ms, self._device)
            return
        # A rank that slept would look like a rank that waits for its peers.
        end_s = time.perf_counter() + self._delay_ms / 1e3
        while time.perf_counter() < end_s:
            pass
