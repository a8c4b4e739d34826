"""A workload that fails in every way a rank can; one function per kind."""

import ctypes
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_aorta.worker import RankEnv, RankResult, StepTimer, Workload, environment_facts

FOREVER_S = 600


class Faulty(Workload):
    """One all-reduce per step; the fault happens in the second step."""

    min_world_size = 2

    def setup(self) -> None:
        """Join the process group."""
        self.env = RankEnv.read()
        self.device = self.env.join("faulty", min_world_size=2)
        self.model = torch.nn.Linear(3, 2, device=self.device)

    def run(self) -> RankResult:
        """Run the steps."""
        timer, tensor = StepTimer(self.device), torch.ones(1, device=self.device)
        for step in range(self.config["steps"]):
            with timer.step():
                if step == 1 and self.env.rank == self.config["rank"]:
                    self.reached().touch()
                    getattr(self, self.config["kind"])()
                elif step == 1 and self.config["kind"] in ("suspended", "given_up", "awaited"):
                    self.give_up_soon()
                dist.all_reduce(tensor)
        return timer.result(0.1).replace(metrics=self.late(), environment=environment_facts(self.device))

    def cleanup(self) -> None:
        """Leave the process group, unless the fault is not to leave."""
        dist.destroy_process_group()

    def reached(self) -> Path:
        """Return the file that the faulty rank leaves when it reaches the fault."""
        return Path(os.environ["AORTA_RANK_FOLDER"]).parent / str(self.config["rank"]) / "reached"

    def give_up_soon(self) -> None:
        """Wait for the fault, then for a peer at most 2 s, long before the time limit of the launch."""
        while not self.reached().exists():
            time.sleep(0.01)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))

    def none(self) -> None:
        """Do nothing."""

    def exception(self) -> None:
        raise ValueError("boom")

    def exit_code(self) -> None:
        os._exit(3)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def suspended(self) -> None:
        """Stay suspended, so that not even SIGTERM makes this rank write its stacks."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def absent(self) -> None:
        """Never enter the collective."""
        time.sleep(FOREVER_S)

    def gil(self) -> None:
        """Loop in C, which never gives up the GIL."""
        sum(itertools.repeat(0))

    def given_up(self) -> None:
        """Hold the GIL until the peers have given up and the agent kills this rank."""
        self.gil()

    def awaited(self) -> None:
        """Sleep until the peers have given up and the agent stops this rank."""
        self.absent()

    def grandchildren(self) -> None:
        """Leave processes in sessions of their own behind, and hang."""
        for _ in range(3):
            subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
        time.sleep(FOREVER_S)

    def one_long_line(self) -> None:
        for _ in range(100):
            sys.stdout.write("x" * (1 << 20))
        sys.stdout.flush()
        time.sleep(FOREVER_S)

    def kill_agent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(FOREVER_S)

    def full_disk(self) -> None:
        """Make every later write fail, even that of the error file."""
        self._limit_files(16)

    def full_disk_at_result(self) -> None:
        """Make the write of the result fail."""
        self._limit_files(8192)

    def _limit_files(self, size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def done_alone(self) -> None:
        """Hang after the last step, when all other ranks have their results."""

    def late(self) -> dict[str, float]:
        """Run the fault after the last step, and return the metrics that it adds to the result."""
        if self.env.rank != self.config["rank"]:
            return {}
        if self.config["kind"] == "done_alone":
            time.sleep(FOREVER_S)
        if self.config["kind"] == "full_disk_at_result":
            return {f"metric_{number}": 1.0 for number in range(1000)}
        return {"metric_nan": float("nan")} if self.config["kind"] == "nan_result" else {}

    nan_result = none

    def nan_parameter(self) -> None:
        with torch.no_grad():
            self.model.weight[0, 2] = float("nan")
