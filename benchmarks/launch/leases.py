"""Use of 8 simulated devices that 4 workers lease, as under ``pytest -n 4 --dist=load``.

Run: python -m benchmarks.launch.leases [--seeds N] [--tests N]

Tests of 1, 2, 4 and 8 devices, sleeping for a random time, are started in a random order by whichever worker is idle;
a worker whose test waits for devices is not idle. The makespan is compared with:

- ideal: the shortest schedule found by a search that reads all durations beforehand and loses no time. The search
  tries list schedules with random choices, some of which hold devices back, with the same 4 workers and the same
  order of starts. The search is not exhaustive, so the true optimum may be shorter.
- bound: a limit that no schedule can beat, in any order of starts: the tests of 8 one after the other, and then the
  others as if they could be cut into pieces.
- FIFO: no overtaking, no time lost.

The busy fraction relative to the ideal is the ratio of the makespans, because the work is the same.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import mean, median

from pytest_aorta.launch.leases import holders, lease

DEVICES = tuple(f"GPU-{number}" for number in range(8))
SIZES = (1, 2, 4, 8)
NUM_WORKERS = 4
DURATION_S = (0.1, 1.0)
NUM_TRIES = 10_000
NUM_HANDOVERS = 30
HANDOVER_WAIT_S = 0.2
# Chooses a test to start among the tests that fit, or None to hold devices back. The last argument says whether a test
# is running.
Choose = Callable[[list[int], list[int], bool], int | None]


@dataclass(frozen=True)
class Case:
    """One simulated test."""

    size: int
    duration_s: float


@dataclass(frozen=True)
class Run:
    """The times at which one simulated test requested, got and released its devices."""

    case: int
    devices: tuple[str, ...]
    asked_s: float
    began_s: float
    ended_s: float


def make_cases(seed: int, num_tests: int) -> list[Case]:
    """Return tests of random sizes and durations."""
    rng = random.Random(seed)
    return [Case(rng.choice(SIZES), rng.uniform(*DURATION_S)) for _ in range(num_tests)]


def work(folder: Path, cases: Sequence[Case], next_case: Synchronized[int], runs: multiprocessing.Queue[Run]) -> None:
    """Lease, sleep and release until no test is left, as one worker."""
    while True:
        with next_case.get_lock():
            number = next_case.value
            next_case.value += 1
        if number >= len(cases):
            return
        asked_s = time.monotonic()
        with lease(
            DEVICES, cases[number].size, exclusive=False, wait_s=60, folder=folder, owner=f"case {number}"
        ) as got:
            began_s = time.monotonic()
            time.sleep(cases[number].duration_s)
            ended_s = time.monotonic()
        runs.put(Run(number, got.resources, asked_s, began_s, ended_s))


def measure(folder: Path, cases: Sequence[Case]) -> list[Run]:
    """Run all tests with real leases."""
    context = multiprocessing.get_context("fork")
    next_case, runs = context.Value("i", 0), context.Queue()
    workers = [context.Process(target=work, args=(folder, cases, next_case, runs)) for _ in range(NUM_WORKERS)]
    for worker in workers:
        worker.start()
    done = [runs.get(timeout=120) for _ in cases]
    for worker in workers:
        worker.join()
    return done


def count_overlaps(runs: Sequence[Run]) -> int:
    """Return pairs of tests that held one device at the same time."""
    overlaps = 0
    for device in DEVICES:
        mine = sorted((run.began_s, run.ended_s) for run in runs if device in run.devices)
        overlaps += sum(next_s < ended_s for (_, ended_s), (next_s, _) in pairwise(mine))
    return overlaps


def simulate_s(cases: Sequence[Case], choose: Choose) -> float:
    """Return the makespan in virtual time of a schedule that starts the tests chosen by ``choose``."""
    now_s, free, started, queue = 0.0, len(DEVICES), 0, list[int]()
    running: list[tuple[float, int]] = []
    while True:
        while len(queue) + len(running) < NUM_WORKERS and started < len(cases):
            queue.append(started)
            started += 1
        fitting = [number for number in queue if cases[number].size <= free]
        chosen = choose(fitting, queue, bool(running)) if fitting else None
        if chosen is not None:
            queue.remove(chosen)
            free -= cases[chosen].size
            heapq.heappush(running, (now_s + cases[chosen].duration_s, chosen))
        elif running:
            now_s, ended = heapq.heappop(running)
            free += cases[ended].size
        else:
            return now_s


def fifo_s(cases: Sequence[Case]) -> float:
    """Return the makespan without overtaking."""
    return simulate_s(cases, lambda fitting, queue, _: queue[0] if fitting[0] == queue[0] else None)


def ideal_s(cases: Sequence[Case], seed: int) -> float:
    """Return the shortest makespan that the search finds."""
    rng = random.Random(seed)

    def attempt(hold_back: float) -> float:
        return simulate_s(
            cases,
            lambda fitting, _, runs: None if runs and rng.random() < hold_back else rng.choice(fitting),
        )

    return min(attempt(hold_back) for hold_back in (0.0, 0.05, 0.15, 0.3) for _ in range(NUM_TRIES // 4))


def bound_s(cases: Sequence[Case]) -> float:
    """Return the makespan that no schedule of these tests can beat."""
    whole_s = sum(case.duration_s for case in cases if case.size == len(DEVICES))
    rest = [case for case in cases if case.size < len(DEVICES)]
    area_s = sum(case.size * case.duration_s for case in rest) / len(DEVICES)
    return whole_s + max(area_s, sum(case.duration_s for case in rest) / NUM_WORKERS)


def report(folder: Path, seed: int, num_tests: int) -> float:
    """Measure one random list of tests, print a line, and return the ratio to the ideal."""
    cases = make_cases(seed, num_tests)
    runs = measure(folder, cases)
    makespan_s = max(run.ended_s for run in runs) - min(run.asked_s for run in runs)
    busy = sum(case.size * case.duration_s for case in cases) / len(DEVICES) / makespan_s
    ideal = ideal_s(cases, seed)
    ratio = ideal / makespan_s
    waits_s = {size: max(r.began_s - r.asked_s for r in runs if cases[r.case].size == size) for size in SIZES}
    print(
        f"seed {seed}: {makespan_s:6.2f} s, overlaps {count_overlaps(runs)}, left {len(holders(folder))}, "
        f"busy {busy:.3f} = {ratio:.3f} of ideal, {bound_s(cases) / makespan_s:.3f} of bound "
        f"(FIFO: {ideal / fifo_s(cases):.3f} of ideal), "
        f"longest wait {max(waits_s.values()):.2f} s "
        f"({', '.join(f'{size}: {wait_s:.2f}' for size, wait_s in waits_s.items())})"
    )
    return ratio


def wait_for_handovers(folder: Path, ready: Event, times_s: multiprocessing.Queue[tuple[float, float]]) -> None:
    """Request repeatedly the device that the parent holds; report when it came and the CPU time of the wait."""
    for _ in range(NUM_HANDOVERS):
        ready.wait()
        ready.clear()
        cpu_s = time.process_time()
        with lease(DEVICES, len(DEVICES), exclusive=True, wait_s=60, folder=folder, owner="waits"):
            times_s.put((time.monotonic(), time.process_time() - cpu_s))


def report_handover(folder: Path) -> None:
    """Print the time from a release to the next start, and the CPU time of waiting."""
    context = multiprocessing.get_context("fork")
    ready, times_s = context.Event(), context.Queue()
    waiter = context.Process(target=wait_for_handovers, args=(folder, ready, times_s))
    waiter.start()
    delays_ms, loads = [], []
    for _ in range(NUM_HANDOVERS):
        with lease(DEVICES, len(DEVICES), exclusive=True, wait_s=60, folder=folder, owner="holds"):
            ready.set()
            # The sleep is not a multiple of the waiter's interval.
            time.sleep(HANDOVER_WAIT_S * random.uniform(1, 2))
            released_s = time.monotonic()
        began_s, cpu_s = times_s.get(timeout=60)
        delays_ms.append(1000 * (began_s - released_s))
        loads.append(cpu_s / (1.5 * HANDOVER_WAIT_S))
    waiter.join()
    print(
        f"hand-over: median {median(delays_ms):.1f} ms, longest {max(delays_ms):.1f} ms; "
        f"a waiting process takes {mean(loads):.1%} of a core ({os.cpu_count()} cores)"
    )


def main() -> None:
    """Print one line per seed and the mean."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tests", type=int, default=40)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report_handover(Path(folder))
        ratios = [report(Path(folder), seed, asked.tests) for seed in range(asked.seeds)]
    print(f"busy relative to ideal: mean {mean(ratios):.3f}, lowest {min(ratios):.3f}")


if __name__ == "__main__":
    main()
