"""The compact facts of one launch that a baseline keeps and a verdict is made from."""

from __future__ import annotations

import calendar
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aorta.plan.profiler import WRAPPERS
from pytest_aorta.result.gpu_facts import lowest_sm_clock_mhz, throttled
from pytest_aorta.result.measurements import StepOverlap, WorkloadResult

SAMPLE_SIZE = 20
RECORDED_AT_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
# What bit-for-bit numbers depend on, next to the world's size and device.
NUMERIC_ENVIRONMENT = (
    "torch", "device", "device_name", "cuda", "hip", "nccl", "cpu_capability", "num_threads",
    "deterministic_algorithms", "bitwise_reproducible", "tf32_matmul", "weight_hash_version",
)  # fmt: skip
_OF_THE_MACHINE = ("throttled", "sm_clock_mhz", "profiler")
# Facts that add up over ranks; the rest is as bad as its worst rank or means the same on each.
_LARGEST_OVER_RANKS = ("peak_memory_bytes",)


@dataclass(frozen=True)
class LaunchFacts:
    """One launch: raw facts, units in names.

    Attributes:
        recorded_at: UTC time, ISO 8601, to the second.
        sitting: which machine, since which boot; launches of one sitting share its noise.
        launcher: how ranks were started.
        num_steps: measured steps.
        step_time_ms: mean, p50, p99, tail5 (mean of the slowest 5%) and max of the steps' maxima over ranks.
        step_time_sample_ms: at most 20 of those maxima, evenly spaced in time.
        slowest_rank_p50_ms, fastest_rank_p50_ms: the span of the ranks' own medians.
        metrics: the workload's facts, merged over ranks (mean; peak memory: largest).
        weight_hashes: step -> hash.
        final_loss: loss of the last measured step, None where nothing was trained.
        environment: what bit-for-bit numbers depend on.
        rank_lag_ms: how much less each rank waits a step than the others; empty where that is not known.
        step_time_growth, memory_growth: relative growth within the launch that noise does not explain.
        canary_ms: the fixed program's times, the slowest rank's, before or after the steps.
        exposed_ms: exposed communication of a profiled step by collective, mean over steps and ranks.
        most_exposed_rank: the rank with the most of it; None where no step was profiled.
        throttled: which devices ran slower than they should have, and why; empty where none did, or nothing is known.
        sm_clock_mhz: median SM clock of the device where it was lowest, None where it is not known.
        profiler: the program around torchrun that made the steps slower, else empty.
    """

    recorded_at: str
    sitting: str
    launcher: str
    num_steps: int
    step_time_ms: dict[str, float]
    step_time_sample_ms: list[float]
    slowest_rank_p50_ms: float
    fastest_rank_p50_ms: float
    metrics: dict[str, float]
    weight_hashes: dict[str, str]
    final_loss: float | None
    environment: dict[str, Any]
    rank_lag_ms: list[float]
    step_time_growth: float
    memory_growth: float
    canary_ms: dict[str, float]
    exposed_ms: dict[str, float] = field(default_factory=dict)
    most_exposed_rank: int | None = None
    throttled: str = ""
    sm_clock_mhz: float | None = None
    profiler: str = ""

    @property
    def device(self) -> str:
        """What ranks computed on, ``cuda`` or ``cpu``."""
        return str(self.environment.get("device", "cuda"))

    @property
    def moment_s(self) -> int:
        """When it was recorded, in seconds since 1970."""
        return calendar.timegm(time.strptime(self.recorded_at, RECORDED_AT_FORMAT))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LaunchFacts:
        """Build from a launch entry of a validated baseline."""
        return cls(**{item.name: data[item.name] for item in fields(cls) if item.name in data})

    def to_json(self) -> dict[str, Any]:
        """The launch entry of a baseline, without what is not known of the machine."""
        return {name: value for name, value in asdict(self).items() if value or name not in _OF_THE_MACHINE}


def launch_facts(result: WorkloadResult) -> LaunchFacts:
    """Condense a result; a step's time is its maximum over ranks."""
    import numpy as np  # costs collection 0.1 s otherwise

    steps = np.asarray(result.step_times_max_ms)
    rank_p50 = np.median(np.asarray(result.step_times_ms), axis=1)
    tail = np.sort(steps)[-max(1, len(steps) // 20) :]
    quantities = {
        "mean": steps.mean(),
        "p50": np.quantile(steps, 0.5),
        "p99": np.quantile(steps, 0.99),
        "tail5": tail.mean(),
        "max": steps.max(),
    }
    stride = -(-len(steps) // SAMPLE_SIZE)
    return LaunchFacts(
        recorded_at=time.strftime(RECORDED_AT_FORMAT, time.gmtime()),
        sitting=sitting_id(),
        launcher=result.launcher,
        num_steps=len(steps),
        step_time_ms={name: _short(value) for name, value in quantities.items()},
        step_time_sample_ms=[_short(value) for value in steps[::stride]],
        slowest_rank_p50_ms=_short(rank_p50.max()),
        fastest_rank_p50_ms=_short(rank_p50.min()),
        metrics={name: _over_ranks(name, values) for name, values in sorted(result.metrics.items())},
        weight_hashes=result.weight_hashes,
        final_loss=result.loss[-1] if result.loss else None,
        environment=_numeric_environment(result),
        rank_lag_ms=[_short(lag) for lag in rank_lags_ms(result.wait_ms)],
        step_time_growth=_short(growth(result.step_times_max_ms, DEPENDENT_STEPS)),
        memory_growth=_short(max(growth(used) for used in result.memory_bytes)) if result.memory_bytes else 0.0,
        canary_ms=_canary(result),
        exposed_ms=_exposed(result.overlap),
        most_exposed_rank=_most_exposed_rank(result.overlap),
        throttled="; ".join(throttled(result.platform_facts)),
        sm_clock_mhz=lowest_sm_clock_mhz(result.platform_facts),
        profiler=result.profiler if result.profiler in WRAPPERS else "",
    )


def _exposed(overlap: list[list[StepOverlap]]) -> dict[str, float]:
    """A rank or step without a collective exposes nothing of it."""
    steps = [step for rank in overlap for step in rank]
    kinds = sorted({kind for step in steps for kind in step.collectives})
    exposed = {
        kind: sum(step.collectives[kind].exposed_ms for step in steps if kind in step.collectives) for kind in kinds
    }
    return {kind: _short(total / len(steps)) for kind, total in exposed.items()}


def _most_exposed_rank(overlap: list[list[StepOverlap]]) -> int | None:
    totals = [sum(step.exposed_comm_ms for step in rank) for rank in overlap]
    return totals.index(max(totals)) if totals else None


def _canary(result: WorkloadResult) -> dict[str, float]:
    """Each part's time on its slowest rank; of before and after the steps the better, since one may be disturbed."""
    before, after = result.canary_before, result.canary_after
    return {name: _short(min(max(before[name]), max(after.get(name, before[name])))) for name in sorted(before)}


def _numeric_environment(result: WorkloadResult) -> dict[str, Any]:
    # On a GPU the host's instruction set computes nothing that counts.
    left_out = ("cpu_capability", "num_threads") if result.device == "cuda" else ()
    names = [name for name in NUMERIC_ENVIRONMENT if name in result.environment and name not in left_out]
    return {name: result.environment[name] for name in names}


def sitting_id() -> str:
    """This machine since this boot, as 12 hex digits that name neither."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    machine = Path("/etc/hostname").read_text(encoding="utf-8") if Path("/etc/hostname").exists() else ""
    return hashlib.sha256(f"{boot} {machine}".encode()).hexdigest()[:12]


def _over_ranks(name: str, values: list[float]) -> float:
    merged = max(values) if name in _LARGEST_OVER_RANKS else sum(values) / len(values)
    return _short(merged)


def _short(value: Any) -> float:
    # Six digits are far below the noise and keep baseline diffs readable; counts are exact.
    number = float(value)
    return number if number.is_integer() else float(f"{number:.6g}")


_BLOCKS = 16
_MIN_VALUES = 10
_MIN_BLOCKS = 7
# Steps, each of which resembles those before it: a lag-1 autocorrelation of 0.6 is usual.
DEPENDENT_STEPS = 5
_GROWTH_CONFIDENCE = 0.99


def rank_lags_ms(wait_ms: Sequence[Sequence[float]]) -> list[float]:
    """How much less each rank waits in collectives than the others, in milliseconds a step.

    ``wait_ms[rank][step]`` becomes, for each rank, the median over steps of the others' median wait less its own.
    The rank that arrives last waits least, so that its lag is the work that it alone has. Empty without waits, or
    with one rank.
    """
    if len(wait_ms) < 2 or not wait_ms[0]:
        return []
    import numpy as np  # costs collection 0.1 s otherwise

    waits = np.asarray(wait_ms)
    num_ranks = len(waits)
    # Of a step's sorted waits, a rank's others are all but one: what was behind its place moves up.
    order = np.argsort(waits, axis=0)
    place = np.argsort(order, axis=0)
    in_order = np.take_along_axis(waits, order, axis=0)
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    others = [np.where(place <= middle, in_order[middle + 1], in_order[middle]) for middle in (low, high)]
    lags: list[float] = np.median((others[0] + others[1]) / 2 - waits, axis=1).tolist()
    return lags


def growth(values: Sequence[float], dependent: int = 1) -> float:
    """The relative growth from the first value to the last that 99% confidence leaves, 0 where it could be none.

    The slope is Theil's and Sen's (J. Am. Stat. Assoc. 63, 1968) over medians of up to 16 blocks, of ``dependent``
    values or more, since neighbouring steps are alike. Negative for a decline. Too few values show none.
    """
    blocks = min(_BLOCKS, len(values) // dependent)
    if len(values) < _MIN_VALUES or blocks < _MIN_BLOCKS or min(values) <= 0:
        return 0.0
    from scipy.stats import theilslopes  # costs collection half a second otherwise

    bounds = [len(values) * number // blocks for number in range(blocks + 1)]
    medians = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    slopes = theilslopes(medians, alpha=_GROWTH_CONFIDENCE)
    low, high = float(slopes.low_slope), float(slopes.high_slope)
    sure = low if low > 0 else high if high < 0 else 0.0
    return sure * (blocks - 1) / median(medians)
