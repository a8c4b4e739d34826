"""Cost of a launch: bare torchrun, our cold launch and our warm launch of one rank program, alternating.

Run: python -m pytest benchmarks/launch/launch.py -s
There are two ranks, on CPU if there is no GPU; on a machine with one GPU, there is one rank.
Environment variable: LAUNCH_ROUNDS, the number of rounds of short programs, 7 by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from pytest_aorta.launch.guarded import launch_environment
from pytest_aorta.launch.launchers import Launchers
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import LaunchOutcome

MAX_RANKS = 2
ROUNDS = int(os.environ.get("LAUNCH_ROUNDS", "7"))
# Bare torchrun runs the same program; the recorder's few lines then do nothing.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pytest_aorta.worker import recorder

device = torch.device("cpu")
if os.environ["AORTA_DEVICE"] == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
model = fully_shard(torch.nn.Linear(64, 64, device=device))
optimizer = torch.optim.AdamW(model.parameters())
recorder.start(device)
end_s = time.monotonic() + float(sys.argv[1])
with recorder.step():
    model(torch.ones(4, 64, device=device)).sum().backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(max(0.0, end_s - time.monotonic()))
dist.destroy_process_group()
"""


class Bench:
    """Three ways to run the program, each timed from outside."""

    def __init__(self, folder: Path, servers: Launchers) -> None:
        self.folder = folder
        self.servers = servers
        gpus = tuple(visible_devices()[:MAX_RANKS])
        self.world = World(len(gpus), "cuda", gpus) if gpus else World(MAX_RANKS, "cpu")
        self.script = folder / "program.py"
        self.script.write_text(PROGRAM, encoding="utf-8")
        self.outcomes: dict[str, list[LaunchOutcome]] = {LauncherKind.TORCHRUN: [], LauncherKind.FORKSERVER: []}

    def bare(self, workload_s: float) -> float:
        """Return the wall time under torchrun alone."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.world.size}"]
        environ = launch_environment(self.plan(LauncherKind.TORCHRUN, workload_s), os.environ)
        began_s = time.monotonic()
        with (self.folder / "bare.log").open("ab") as log:
            program = [*command, str(self.script), str(workload_s)]
            subprocess.run(program, env=environ, stdout=log, stderr=log, check=True, timeout=300)
        return time.monotonic() - began_s

    def ours(self, launcher: str, workload_s: float) -> float:
        """Return the wall time of one of our launches, which has to succeed."""
        plan = self.plan(launcher, workload_s)
        began_s = time.monotonic()
        outcome = self.servers.launch(plan)
        wall_s = time.monotonic() - began_s
        failure = launch_failure(plan, outcome)
        assert failure is None, failure
        assert outcome.launcher == launcher
        self.outcomes[launcher].append(outcome)
        return wall_s

    def plan(self, launcher: str, workload_s: float) -> LaunchPlan:
        """Return a plan of the program with its own folder."""
        run_dir = self.folder / f"{launcher}-{time.monotonic_ns()}"
        root = Path(__file__).parents[2]
        script, args = str(self.script), (str(workload_s),)
        given = {"timeout_s": 300.0, "run_dir": run_dir, "cwd": root, "launcher": launcher}
        return LaunchPlan("program", None, {}, script, args, world=self.world, **given)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Provide a bench whose fork server is running, as after the first launch of a session."""
    servers = Launchers()
    try:
        bench = Bench(tmp_path, servers)
        began_s = time.monotonic()
        bench.ours(LauncherKind.FORKSERVER, 0.0)
        print(f"\nfork server started and first launch: {time.monotonic() - began_s:.2f} s, once a session")
        bench.outcomes[LauncherKind.FORKSERVER].clear()
        yield bench
    finally:
        servers.close()


@pytest.mark.parametrize(("workload_s", "num_rounds"), [(0.2, ROUNDS), (10.0, min(ROUNDS, 3))])
def test_cost_of_a_launch(bench: Bench, workload_s: float, num_rounds: int) -> None:
    """Print wall times, ratios to bare torchrun with their range over rounds, and the phases."""
    walls_s: dict[str, list[float]] = {"bare torchrun": [], "cold": [], "warm": []}
    for number in range(1, num_rounds + 1):
        walls_s["bare torchrun"].append(bench.bare(workload_s))
        walls_s["cold"].append(bench.ours(LauncherKind.TORCHRUN, workload_s))
        walls_s["warm"].append(bench.ours(LauncherKind.FORKSERVER, workload_s))
        # The rounds so far also count if a time limit ends the run.
        print(
            f"round {number}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in walls_s.items()),
            flush=True,
        )
    print(f"workload of {workload_s:g} s, {bench.world.platform}, {num_rounds} rounds")
    for name, values in walls_s.items():
        ratios = sorted(value / bare for value, bare in zip(values, walls_s["bare torchrun"], strict=True))
        spread = f"ratio {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"{name:13} wall p50 {median(values):6.2f} s, {spread}")
