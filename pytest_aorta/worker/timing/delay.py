"""Extra work of a known duration, to plant a real slowdown: a kernel on CUDA, a busy loop on CPU."""

from __future__ import annotations

import time

import torch

_PROBE_CYCLES = 20_000_000


class Delay:
    """A callable that occupies the current stream, or the CPU rank, for ``delay_ms`` milliseconds."""

    def __init__(self, device: torch.device, delay_ms: float) -> None:
        """Calibrate the delay; on CUDA this waits for the device."""
        self._delay_s = delay_ms / 1e3
        on_cuda = device.type == "cuda"
        self._cycles = int(delay_ms * _cycles_per_ms()) if on_cuda and delay_ms else 0 if on_cuda else None

    def __call__(self) -> None:
        """Occupy the stream or the rank once; on CUDA the host does not wait."""
        if self._cycles is None:
            # A rank that slept would look like a rank that waits for its peers.
            end_s = time.perf_counter() + self._delay_s
            while time.perf_counter() < end_s:
                pass
        elif self._cycles:
            torch.cuda._sleep(self._cycles)


def _cycles_per_ms() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first sleep loads the kernel and raises the clock rate.
    torch.cuda._sleep(_PROBE_CYCLES)
    begin.record()
    torch.cuda._sleep(_PROBE_CYCLES)
    end.record()
    end.synchronize()
    return _PROBE_CYCLES / float(begin.elapsed_time(end))
