"""The ``copy_compute`` workload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist

from pytest_aorta.worker import (
    FailureDetail,
    RankEnv,
    RankResult,
    StepTimer,
    environment_facts,
    measure,
    profiled,
)

from ..common.result import GroupWorkload, peak_memory_metrics
from ..common.seeding import generator
from ..common.settings import read_settings
from ..common.streams import DeviceStream, InlineStream, Stream, ThreadStream
from .copies import KINDS, Copy


@dataclass(frozen=True)
class Fault:
    """A fault planted in the first kind of copy on one rank."""

    kind: str = "none"
    rank: int = 0


@dataclass(frozen=True)
class CopyComputeSettings:
    """The keys of ``copy_compute``."""

    steps: int
    warmup: int
    profile_steps: int
    matrix_size: int
    gemms: int
    dtype: torch.dtype
    copy_mb: float
    copy_kind: str
    all_reduce_mb: float
    priority: int
    overlap: bool
    seed: int
    fault: Fault

    @property
    def copy_kinds(self) -> tuple[str, ...]:
        """Return the kinds of copy that each step makes."""
        return KINDS if self.copy_kind == "all" else (self.copy_kind,)


def make_stream(settings: CopyComputeSettings, device: torch.device) -> Stream:
    """Return a stream for copies.

    Raises:
        ValueError: The device has no streams of the given ``priority``.
    """
    if not settings.overlap:
        return InlineStream()
    if device.type == "cpu":
        return ThreadStream()
    priority = settings.priority
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    if not greatest <= priority <= least:
        raise ValueError(f"priority is {priority}; allowed on this device is {greatest} to {least}")
    return DeviceStream(device, priority=priority)


def make_variants(
    compute: Callable[[], None], copies: Sequence[Copy], streams: Sequence[Stream]
) -> dict[str, Callable[[], None]]:
    """Return what each variant of a step runs, by its name."""

    def copy() -> None:
        for each in copies:
            each.transfer(False)

    def serial() -> None:
        compute()
        copy()

    def overlapped() -> None:
        works = [stream.submit(each.transfer) for stream, each in zip(streams, copies, strict=True)]
        compute()
        for work in works:
            work.wait()

    return {"serial": serial, "overlapped": overlapped, "compute": compute, "copy": copy}


class CopyComputeWorkload(GroupWorkload):
    """Matrix products and copies: in sequence, concurrently, and each alone, in turn within one launch.

    The step time is the time of the concurrent variant. Ranks measure independently, all at the same time.
    """

    def setup(self) -> None:
        """Join the process group and allocate matrices and both ends of every copy.

        Raises:
            ValueError: The device has no streams of the given ``priority``.
        """
        env = RankEnv.read()
        device, self._rank = env.join("copy_compute"), env.rank
        settings = self._settings = read_settings(CopyComputeSettings, self.config)
        self._device = device
        streams = [make_stream(settings, device) for _ in settings.copy_kinds]
        fault = settings.fault
        kinds = [fault.kind if fault.rank == env.rank else "none", "none", "none"]
        self._copies = [
            Copy(kind, settings.copy_mb, device, planted)
            for kind, planted in zip(settings.copy_kinds, kinds, strict=False)
        ]
        size, random = settings.matrix_size, generator(device, "matrices", settings.seed)
        left, right = (torch.randn(size, size, device=device, generator=random) for _ in range(2))
        left, right = left.to(settings.dtype), (right / size**0.5).to(settings.dtype)
        product = torch.empty_like(left)

        def compute() -> None:
            for _ in range(settings.gemms):
                torch.mm(left, right, out=product)

        self._variants = make_variants(compute, self._copies, streams)
        if settings.all_reduce_mb:
            summed = torch.zeros(round(settings.all_reduce_mb * 2**18), device=device)
            self._variants["all_reduce"] = lambda: dist.all_reduce(summed)

    def run(self) -> RankResult:
        """Check copied data, measure, and check again."""
        settings = self._settings
        for number in range(settings.warmup):
            for variant in self._order(number):
                self._variants[variant]()
        failures = self._check(0)
        times_ms, timer, elapsed_sec = self._measure()
        failures += self._check(1)
        # Of the timer's steps, one in four is a step of the result.
        result = RankResult.of_steps(times_ms["overlapped"], elapsed_sec).replace(
            passed=not failures,
            failure_count=len(failures),
            configured_iterations=settings.steps,
            failures=failures,
            memory_bytes=timer.memory_bytes(),
            resident_bytes=timer.resident_bytes(),
            cpu_wait=timer.cpu_wait(),
            metrics=self._metrics({name: fmean(times) for name, times in times_ms.items()}),
            environment=environment_facts(self._device),
        )
        found = profiled(result, self._variants["overlapped"], settings.profile_steps, self._device)
        # Overlap metrics are about communication, which this workload does not have, so none are added.
        return found.replace(metrics=result.metrics)

    def _order(self, number: int) -> list[str]:
        """Return the variants of a round; rounds alternate the order, so that no variant always follows the same."""
        names = list(self._variants)
        return names if number % 2 == 0 else names[::-1]

    def _measure(self) -> tuple[dict[str, list[float]], StepTimer, float]:
        """Return the milliseconds of each variant in each round, the timer, and the wall time in seconds."""
        order = []

        def run_round(number: int, timer: StepTimer) -> None:
            for variant in self._order(number):
                with timer.step():
                    self._variants[variant]()
                order.append(variant)

        timer, elapsed_sec = measure(run_round, self._settings.steps, self._device)
        times_ms: dict[str, list[float]] = {variant: [] for variant in self._variants}
        for variant, time_ms in zip(order, timer.step_times_ms(), strict=True):
            times_ms[variant].append(time_ms)
        return times_ms, timer, elapsed_sec

    def _check(self, check: int) -> list[FailureDetail]:
        """Run the concurrent variant on data of this check, and compare every copied element."""
        for copy in self._copies:
            copy.prepare(self._settings.seed, check)
        self._variants["overlapped"]()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return [detail for copy in self._copies if (detail := copy.failure(check, self._rank)) is not None]

    def _metrics(self, mean_ms: dict[str, float]) -> dict[str, float]:
        flops = 2 * self._settings.matrix_size**3 * self._settings.gemms
        metrics = {f"time_{variant}_ms": time_ms for variant, time_ms in mean_ms.items()}
        metrics |= {
            "overlap_saving": 1 - mean_ms["overlapped"] / mean_ms["serial"],
            "gemm_throughput_tflops": flops / mean_ms["compute"] / 1e9,
            "copy_bytes_per_step": float(sum(copy.source.nbytes for copy in self._copies)),
        }
        return metrics | peak_memory_metrics(self._device)
