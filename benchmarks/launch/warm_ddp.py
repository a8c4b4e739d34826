"""Counts the warm launches of an unmodified DDP script that hang beside busy processes; none may hang.

Run: python -m benchmarks.launch.warm_ddp [--launches N] [--busy N]

The script keeps a ``DistributedDataParallel`` in a global, which holds the last reference to its process group. If
dropping the script's globals destroys the group, the main thread holds the GIL while it joins
gloo's thread, and that thread needs the GIL to free the last collective. Busy loops make that deadlock likely.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure

NUM_RANKS = 2
# A launch takes a few seconds beside the busy processes; a hanging launch takes all of this time.
LAUNCH_LIMIT_S = 120.0
PASSED = "passed"
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for step in range(5):
    model(torch.ones(2, 64)).sum().backward()
"""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run ``number`` processes that never sleep."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def launch(servers: ForkServers, folder: Path, number: int) -> str:
    """Launch the script warm; return ``passed`` or the class of the failure."""
    plan = LaunchPlan(
        name="ddp",
        spec=None,
        config={},
        script=str(folder / "train.py"),
        args=(),
        world=World(NUM_RANKS, "cpu"),
        timeout_s=LAUNCH_LIMIT_S,
        run_dir=folder / str(number),
        cwd=folder,
        launcher=LauncherKind.FORKSERVER,
    )
    outcome = servers.launch(plan)
    if outcome.launcher != LauncherKind.FORKSERVER:
        return "launched cold"
    if failure := launch_failure(plan, outcome):
        return failure.kind
    return PASSED


def main() -> None:
    """Print the launches by outcome and their wall times; return 1 if one did not pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside the launches")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    walls_s = []
    with tempfile.TemporaryDirectory(prefix="aorta-ddp-") as scratch, closing(ForkServers()) as servers:
        folder = Path(scratch)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        with busy_processes(given.busy):
            for number in range(given.launches):
                began_s = time.monotonic()
                outcomes[launch(servers, folder, number)] += 1
                walls_s.append(time.monotonic() - began_s)
    print(f"{given.launches} warm launches beside {given.busy} busy processes: {dict(outcomes.most_common())}")
    print(f"wall time of a launch: p50 {median(walls_s):.2f} s, longest {max(walls_s):.2f} s")
    sys.exit(set(outcomes) != {PASSED})


if __name__ == "__main__":
    main()
