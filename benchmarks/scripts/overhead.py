"""Time that the recorder adds to a step of unedited scripts.

Run: python -m benchmarks.scripts.overhead [--repetitions 20] [--scripts ddp,fsdp2,accumulation,gan]

A script runs again and again in one process, of one rank. The recorder observes every other block of five steps of the
first optimizer, and in the next run the other blocks, so that both kinds of steps share the machine and the place in
the script. The processor time of the script's thread is compared, since waits and other processes do not add to it;
the first step of a block is left out. A repetition is two runs; its value is the difference of the medians over steps.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

FOLDER = Path(__file__).parent / "unedited"
BLOCK = 5
LIMIT_US = 10.0
_INSIDE = "OVERHEAD_OF"


def main() -> None:
    """Measure the scripts that are asked for; exit with 1 if one exceeds 1% of a step of 1 ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--scripts", default="ddp,fsdp2,accumulation,gan")
    arguments = parser.parse_args()
    print("| script | step without | the recorder adds, median (quartiles) | of 1 ms |\n| --- | --- | --- | --- |")
    worst_us = 0.0
    for script in arguments.scripts.split(","):
        pairs = measured(script, arguments.repetitions)
        added = [on - off for on, off in pairs]
        low, us, high = quantiles(added, n=4)
        worst_us = max(worst_us, us)
        step_ms = median(off for _, off in pairs) / 1000
        print(f"| {script} | {step_ms:.2f} ms | {us:.1f} µs ({low:.1f} to {high:.1f}) | {us / 10:.1f}% |", flush=True)
    sys.exit(worst_us > LIMIT_US)


def measured(script: str, repetitions: int) -> list[tuple[float, float]]:
    """Return the medians over steps with and without the recorder, in µs, for each repetition."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ = os.environ | rank | {_INSIDE: f"{script},{repetitions}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.scripts.overhead"]
    done = subprocess.run(words, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return [(on, off) for on, off in json.loads(done.stdout.splitlines()[-1])]


def run_repetitions(script: str, repetitions: int) -> None:
    """Run the script in this process, and print the medians."""
    from pytest_aorta.worker import optimized

    # No step is profiled.
    optimized.TIMED_STEPS = sys.maxsize
    path = FOLDER / f"{script}.py"
    sys.argv = [str(path)]
    print(json.dumps([run_twice(path) for _ in range(repetitions)]))


def run_twice(path: Path) -> tuple[float, float]:
    """Run the script twice; return the medians over steps with and without the recorder, in µs."""
    times: dict[str, list[float]] = {"on": [], "off": []}
    for parity in range(2):
        run_once(path, parity, times)
    return median(times["on"]), median(times["off"])


def run_once(path: Path, parity: int, times: dict[str, list[float]]) -> None:
    """Run the script once, and add the times of its steps."""
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    from pytest_aorta.worker.observing import Observer

    observer = Observer().start()
    first: list[Optimizer] = []
    ends_ns: list[int] = []
    is_due = False

    def note(optimizer: Optimizer, _args: object, _keywords: object) -> None:
        nonlocal is_due
        first.extend([] if first else [optimizer])
        if optimizer is first[0]:
            ends_ns.append(time.thread_time_ns())
            is_due = len(ends_ns) % BLOCK == 0

    def switched(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
        # Hooks can't be removed within a step of an optimizer.
        nonlocal is_due
        if is_due:
            is_due = False
            observer.stop() if (len(ends_ns) // BLOCK + parity) % 2 else observer.start()
        zero_grad(optimizer, *args, **keywords)

    hook, zero_grad = register_optimizer_step_post_hook(note), Optimizer.zero_grad
    Optimizer.zero_grad = switched
    runpy.run_path(str(path), run_name="__main__")
    Optimizer.zero_grad = zero_grad
    hook.remove()
    observer.stop()
    # In the first two blocks, the costs are counted and memory is allocated.
    for number in range(2 * BLOCK, len(ends_ns)):
        if number % BLOCK > 1:
            times["off" if (number // BLOCK + parity) % 2 else "on"].append(
                (ends_ns[number] - ends_ns[number - 1]) / 1000
            )


if __name__ == "__main__":
    if _INSIDE in os.environ:
        name, count = os.environ[_INSIDE].split(",")
        run_repetitions(name, int(count))
    else:
        main()
