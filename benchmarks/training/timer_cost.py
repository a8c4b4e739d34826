"""The cost of the step timer per step: the same training loop with the timer and with two clock readings, in turn.

Run: python -m benchmarks.training.timer_cost [--device cuda] [--rounds 20] [--steps 200] [--size 2048] [--layers 24]
Both loops are timed as a whole, between two synchronizations, with profiling off. Each round has one pair, in
alternating order. The output is the median difference of pairs and its 95% interval by order statistics.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
from scipy.stats import binom

from pytest_aorta.worker import StepTimer

ALLOWED = 0.003


def main(arguments: Sequence[str]) -> int:
    """Print the cost; return 1 if the whole interval exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of each matrix")
    parser.add_argument("--layers", type=int, default=24, help="products of a step")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    step = make_step(device, given.size, given.layers)
    # Warm: kernels loaded, clocks up.
    loop_s(step, given.steps, device, timed=True)
    loop_s(step, given.steps, device, timed=False)
    shares, step_ms = [], []
    for number in range(given.rounds):
        order = (True, False) if number % 2 else (False, True)
        took_s = {timed: loop_s(step, given.steps, device, timed=timed) for timed in order}
        shares.append(took_s[True] / took_s[False] - 1)
        step_ms.append(1e3 * took_s[False] / given.steps)
    low, high = interval(shares)
    print(
        f"{given.device}, {given.rounds} pairs of {given.steps} steps of {median(step_ms):.3f} ms: the timer adds "
        f"{median(shares):+.3%} [{low:+.3%}, {high:+.3%}], {median(shares) * median(step_ms) * 1e3:+.2f} us a step; "
        f"allowed {ALLOWED:.1%}"
    )
    return int(low > ALLOWED)


def make_step(device: torch.device, size: int, layers: int) -> Callable[[], None]:
    """Return a step that the host enqueues far ahead of the device, as in training."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    operand, product = (
        torch.ones(size, size, dtype=dtype, device=device),
        torch.empty(size, size, dtype=dtype, device=device),
    )

    def step() -> None:
        for _ in range(layers):
            torch.mm(operand, operand, out=product)

    return step


def loop_s(step: Callable[[], None], steps: int, device: torch.device, *, timed: bool) -> float:
    """Return the seconds of the whole loop."""
    timer = StepTimer(device)
    around: Callable[[], AbstractContextManager[None]] = timer.step if timed else nullcontext
    synchronize(device)
    began_s = time.perf_counter()
    for _ in range(steps):
        with around():
            step()
    synchronize(device)
    return time.perf_counter() - began_s


def synchronize(device: torch.device) -> None:
    """Wait for all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval of the median of at least 95%, by order statistics, which assume no distribution."""
    ascending, count = sorted(values), len(values)
    place = max(0, int(binom.ppf(0.025, count, 0.5)) - 1)
    return ascending[place], ascending[count - 1 - place]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
