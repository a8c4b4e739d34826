"""A training step of one rank with planted causes of a longer step, for benchmarks/overlap/split.py.

Each layer has products beside the gather of the next layer's parameters. The argument is JSON of :class:`Planted`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from pytest_aorta.worker import Delay, RankEnv, capture_overlap, recorder


@dataclass(frozen=True)
class Planted:
    """The sizes of the step, and the causes planted in it.

    Attributes:
        layers, size, products: Layers, rows of a square product, and products per layer.
        shard, gradient: Elements of a rank's shard of a layer, and of a planted all-reduce.
        steps, profile_steps: Measured and profiled steps.
        kernel_ms: Compute added on every rank.
        straggler_ms: Compute added on the last rank.
        exposed_ms: All-reduces in line with compute, as many as take about this long.
        host_ms: Sleep of the last rank's host after a step.
        blocks: Whether each rank's host waits for its device after a step.
    """

    layers: int
    size: int
    products: int
    shard: int
    gradient: int
    steps: int
    profile_steps: int
    kernel_ms: float = 0.0
    straggler_ms: float = 0.0
    exposed_ms: float = 0.0
    host_ms: float = 0.0
    blocks: bool = False


class Step:
    """The step on this rank."""

    def __init__(self, planted: Planted, device: torch.device) -> None:
        self._planted, self._device = planted, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._operand = torch.randn(planted.size, planted.size, device=device).to(dtype) / planted.size
        self._product = torch.empty_like(self._operand)
        self._shard = torch.zeros(planted.shard, device=device, dtype=dtype)
        self._gathered = torch.zeros(2, planted.shard * dist.get_world_size(), device=device, dtype=dtype)
        self._gradient = torch.zeros(planted.gradient, device=device)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        self._kernel = self._compute_for(planted.kernel_ms)
        self._straggler = self._compute_for(planted.straggler_ms if is_last else 0.0)
        self._sleep_s = planted.host_ms / 1e3 if is_last else 0.0
        self.reduce_ms = self._time_of_reduce_ms()
        self.reduces = round(planted.exposed_ms / self.reduce_ms)

    def __call__(self) -> None:
        """Run the step once."""
        gathers = [self._gather(0)]
        for layer in range(self._planted.layers):
            gathers[layer].wait()
            if layer + 1 < self._planted.layers:
                gathers.append(self._gather(layer + 1))
            for _ in range(self._planted.products):
                torch.mm(self._operand, self._operand, out=self._product)
        self._kernel()
        self._straggler()
        for _ in range(self.reduces):
            dist.all_reduce(self._gradient)
        if self._planted.blocks and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        time.sleep(self._sleep_s)

    def enqueue_ms(self) -> float:
        """Return the host's time for a step that it enqueues while the device is idle, without the sleep."""
        times = []
        for _ in range(3):
            self._synchronize()
            began_s = time.perf_counter()
            self()
            times.append(time.perf_counter() - began_s - self._sleep_s)
        return median(times) * 1e3

    def _gather(self, layer: int) -> dist.Work:
        return dist.all_gather_into_tensor(self._gathered[layer % 2], self._shard, async_op=True)

    def _compute_for(self, duration_ms: float) -> Callable[[], None]:
        if self._device.type == "cuda":
            return Delay(self._device, duration_ms)

        def multiply() -> None:
            end_s = time.perf_counter() + duration_ms / 1e3
            while time.perf_counter() < end_s:
                torch.mm(self._operand, self._operand, out=self._product)

        return multiply

    def _time_of_reduce_ms(self, count: int = 20) -> float:
        """Return the time of an all-reduce between all-reduces, the longest rank's."""
        for _ in range(3):
            dist.all_reduce(self._gradient)
        dist.barrier()
        self._synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(self._gradient)
        self._synchronize()
        each = torch.tensor([(time.perf_counter() - began_s) / count * 1e3], device=self._device)
        dist.all_reduce(each, dist.ReduceOp.MAX)
        return float(each)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Measure and profile the step."""
    device = RankEnv.read().join("planted_step")
    planted = Planted(**json.loads(sys.argv[1]))
    step = Step(planted, device)
    recorder.start(device, warmup=3)
    for _ in range(3 + planted.steps):
        with recorder.step():
            step()
    recorder.metric("planted_exposed_ms", step.reduces * step.reduce_ms)
    recorder.metric("enqueue_ms", step.enqueue_ms())
    recorder.overlap(capture_overlap(step, planted.profile_steps, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
