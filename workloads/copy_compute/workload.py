"""The ``copy_compute`` workload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist

from pytest_aorta.worker import (
    FailureDetail,
    RankEnv,
    RankResult,
    StepTimer,
    StreamSpans,
    Telemetry,
    Workload,
    capture_overlap,
    environment_facts,
    measure,
)

from ..common.seeding import generator
from ..fsdp.lanes import InlineLane, Lane, StreamLane
from .copies import KINDS, Copy
from .lanes import ThreadLane

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CopyComputeWorkload(Workload):
    """Matrix products and copies: one after the other, at once, and each alone, in turn within one launch.

    A step's time is that of both at once. Each rank measures for itself, all at the same time.
    """

    min_world_size = 1

    def setup(self) -> None:
        """Join the process group and allocate matrices and both ends of every copy.

        Raises:
            ValueError: the device has no streams of that priority.
        """
        env = RankEnv.read()
        self._rank = env.rank
        self._device = env.join("copy_compute", min_world_size=self.min_world_size)
        self._spans = StreamSpans(self._device, self.config["span_every"])
        self._make_lanes()
        self._make_matrices()
        # In an order that changes from round to round, so that none always comes after the same.
        self._variants: dict[str, Callable[[], None]] = {
            "serial": self._serial,
            "overlapped": self._overlapped,
            "compute": self._compute,
            "copy": self._copy,
        }

    def run(self) -> RankResult:
        """Check, measure, check again."""
        for number in range(self.config["warmup"]):
            for variant in self._order(number):
                self._variants[variant]()
        failures = self._check(0)
        times_ms, timer, elapsed_sec = self._measure()
        failures += self._check(1)
        result = RankResult(
            passed=not failures,
            failure_count=len(failures),
            configured_iterations=self.config["steps"],
            total_iterations=len(times_ms["overlapped"]),
            step_times_ms=times_ms["overlapped"],
            elapsed_sec=elapsed_sec,
            failures=failures,
            metrics=self._metrics({name: fmean(times) for name, times in times_ms.items()}),
            environment=environment_facts(self._device),
            memory_bytes=timer.memory_bytes(),
        )
        if not self.config["profile_steps"]:
            return result
        capture = capture_overlap(self._overlapped, self.config["profile_steps"], self._device)
        # Without communication its metrics say nothing.
        return replace(result, overlap=capture.steps, timeline=capture.timeline)

    def telemetry(self) -> Telemetry:
        """What streams did in every so many-th run of both at once, which are the steps."""
        return Telemetry(captures=self._spans.captures())

    def cleanup(self) -> None:
        """Leave the process group and free matrices and copies."""
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("_variants", "_copies", "_lanes", "_left", "_right", "_product", "_spans"):
            self.__dict__.pop(name, None)

    def _make_lanes(self) -> None:
        config = self.config
        kinds = KINDS if config["copy_kind"] == "all" else (config["copy_kind"],)
        fault = config["fault"]
        planted = fault.get("kind", "none") if fault.get("rank", 0) == self._rank else "none"
        self._copies = [
            Copy.allocate(kind, config["copy_mb"], self._device, planted if kind == kinds[0] else "none")
            for kind in kinds
        ]
        self._lanes = [self._make_lane() for _ in kinds]

    def _make_lane(self) -> Lane:
        if not self.config["overlap"]:
            return InlineLane()
        if self._device.type == "cpu":
            return ThreadLane()
        priority = self.config["priority"]
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        if not greatest <= priority <= least:
            raise ValueError(f"priority is {priority}; allowed on this device is {greatest} to {least}")
        return StreamLane(self._device, priority=priority)

    def _make_matrices(self) -> None:
        size, random = self.config["matrix_size"], generator(self._device, "matrices", self.config["seed"])
        left, right = (torch.randn(size, size, device=self._device, generator=random) for _ in range(2))
        dtype = DTYPES[self.config["dtype"]]
        self._left, self._right = left.to(dtype), (right / size**0.5).to(dtype)
        self._product = torch.empty_like(self._left)

    def _compute(self) -> None:
        with self._spans.span("compute"):
            for _ in range(self.config["gemms"]):
                torch.mm(self._left, self._right, out=self._product)

    def _copy(self) -> None:
        for copy in self._copies:
            copy.transfer(False)

    def _serial(self) -> None:
        self._compute()
        self._copy()

    def _overlapped(self) -> None:
        tickets = [
            lane.submit(self._spans.around("copy", copy.transfer))
            for lane, copy in zip(self._lanes, self._copies, strict=True)
        ]
        self._compute()
        for ticket in tickets:
            ticket.wait()

    def _order(self, number: int) -> list[str]:
        """The variants of a round."""
        names = list(self._variants)
        return names if number % 2 == 0 else names[::-1]

    def _measure(self) -> tuple[dict[str, list[float]], StepTimer, float]:
        """Milliseconds of each variant in each round."""
        order = []

        def run_round(number: int, timer: StepTimer) -> None:
            for variant in self._order(number):
                is_step = variant == "overlapped"
                with timer.step(), self._spans.step(number) if is_step else nullcontext():
                    self._variants[variant]()
                order.append(variant)

        timer, elapsed_sec = measure(run_round, self.config["steps"], self._device)
        times_ms: dict[str, list[float]] = {variant: [] for variant in self._variants}
        for variant, time_ms in zip(order, timer.step_times_ms(), strict=True):
            times_ms[variant].append(time_ms)
        return times_ms, timer, elapsed_sec

    def _check(self, check: int) -> list[FailureDetail]:
        """Run both at once on data of this check, and compare every copied element."""
        for copy in self._copies:
            copy.prepare(self.config["seed"], check)
        self._overlapped()
        self._synchronize()
        found = [copy.failure(check, self._rank) for copy in self._copies]
        return [detail for detail in found if detail is not None]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _metrics(self, mean_ms: dict[str, float]) -> dict[str, float]:
        config = self.config
        flops = 2 * config["matrix_size"] ** 3 * config["gemms"]
        metrics = {f"time_{variant}_ms": time_ms for variant, time_ms in mean_ms.items()}
        metrics |= {
            "overlap_saving": 1 - mean_ms["overlapped"] / mean_ms["serial"],
            "gemm_throughput_tflops": flops / mean_ms["compute"] / 1e9,
            "copy_bytes_per_step": float(sum(copy.num_bytes for copy in self._copies)),
        }
        if self._device.type == "cuda":
            metrics["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return metrics
