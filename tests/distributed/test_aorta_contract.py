"""Classes with AORTA's contract, which import nothing of this package, under real launches on two CPU ranks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.processes import mentioning, own_environ
from tests.unit.builders import read_json, run_python, write

# What AORTA's package has: an entry point that names a class, and a base class of its own.
METADATA = "Metadata-Version: 2.1\nName: aorta\nVersion: 1.0\n"
ENTRY_POINTS = """[aorta.workloads]
fsdp = aorta.workloads.fsdp:FsdpWorkload
trained = aorta.workloads.fsdp:TrainedWorkload
stuck = aorta.workloads.fsdp:StuckWorkload
other = aorta.workloads.fsdp:OtherResult
"""
BASE = """
from dataclasses import dataclass, field

@dataclass
class WorkloadResult:
    passed: bool
    failure_count: int
    step_times_ms: list
    total_iterations: int
    metrics: dict = field(default_factory=dict)

class Workload:
    def __init__(self, config):
        self.config = config
"""
CLASSES = """
import dataclasses
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from aorta.workloads import Workload, WorkloadResult


class FsdpWorkload(Workload):
    def setup(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.size < 2:
            raise RuntimeError(f"FsdpWorkload needs WORLD_SIZE >= 2, got {self.size}")
        dist.init_process_group("gloo")
        self.shard = torch.full((1024,), float(self.rank))

    def step(self):
        full = torch.empty(self.size * 1024)
        for _ in range(self.config.get("gathers", 1)):
            dist.all_gather_into_tensor(full, self.shard)
        torch.mm(full.view(64, -1), full.view(-1, 64))
        return int(full.sum() != self.config.get("expected", 1024))

    def run(self):
        times, wrong = [], 0
        for number in range(2 + self.config["steps"]):
            began_s = time.perf_counter()
            wrong += self.step()
            if number >= 2:
                times.append(1000 * (time.perf_counter() - began_s))
        metrics = {"gemm_throughput": 1.5, "step_time_p50": sorted(times)[0], "dtype": "float32"}
        return WorkloadResult(not wrong, wrong, times, 2 + self.config["steps"], metrics)

    def cleanup(self):
        dist.destroy_process_group()


class TrainedWorkload(FsdpWorkload):
    def setup(self):
        super().setup()
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.get("lr", 0.1))

    def step(self):
        self.model(torch.ones(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0


class StuckWorkload(FsdpWorkload):
    def step(self):
        if self.rank == 1:
            time.sleep(1000)
        return super().step()


class OtherResult:
    __slots__ = ("inner", "setup", "cleanup")

    def __init__(self, config):
        self.inner = FsdpWorkload(config)
        self.setup, self.cleanup = self.inner.setup, self.inner.cleanup

    def run(self):
        result = self.inner.run()
        numbers = {"throughput": np.float32(2.5), "tokens": torch.tensor(8)}
        arrays = WorkloadResult(np.bool_(True), np.int64(0), np.array(result.step_times_ms), np.int64(5), numbers)
        return dataclasses.replace(arrays, **self.inner.config.get("fields", {}))
"""
TESTS = """
import json

import pytest
from pytest_aorta import LaunchError, WorkloadFailed

pytestmark = pytest.mark.world(size=2)


def test_fsdp(workload):
    result = workload.run("aorta:fsdp", steps=6)
    assert result.total_iterations == len(result.step_times_ms) == 6
    assert result.metrics["total_iterations"] == 8
    assert result.metrics["gemm_throughput"] == 1.5
    assert "dtype" not in result.metrics
    assert 0 <= result.metrics["overlap_ratio"] <= 1
    workload.check(result)


def test_trained(workload):
    result = workload.run("trained", steps=40)
    assert len(result.step_times_ms) == 40
    [series] = result.ranks[0].series
    assert (series.optimizer, series.num_steps) == ("SGD", 42)
    workload.check(result)


def test_numbers_of_numpy_and_torch(workload):
    result = workload.run("other", steps=3)
    assert len(result.step_times_ms) == 3
    assert {"throughput": 2.5, "tokens": 8, "total_iterations": 5}.items() <= result.metrics.items()


WRONG = [("step_times_ms", None), ("step_times_ms", []), ("metrics", [1])]


@pytest.mark.parametrize("name, value", WRONG)
def test_wrong_field(workload, name, value):
    with pytest.raises(LaunchError, match=rf"the result of OtherResult\\.run.*{name}: .*Expected"):
        workload.run("other", steps=3, fields={name: value})


def test_wrong_values(workload):
    with pytest.raises(WorkloadFailed, match="aorta:fsdp"):
        workload.run("aorta:fsdp", steps=3, expected=0)


@pytest.mark.launch_timeout(15)
def test_stuck(workload):
    with pytest.raises(LaunchError) as error:
        workload.run("stuck", steps=3)
    assert error.value.kind == "hang in collective"
    assert "rank 1" in str(error.value)


@pytest.mark.world(size=1)
def test_one_rank(workload):
    with pytest.raises(LaunchError, match="FsdpWorkload needs WORLD_SIZE >= 2, got 1"):
        workload.run("aorta:fsdp", steps=3)
"""

PYTEST = ("pytest", "-p", "no:cacheprovider", "--aorta-launcher=forkserver")
Runner = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """Run pytest, or another module, in a project beside whose environment AORTA is installed."""
    installed = tmp_path / "installed"
    write(installed / "aorta-1.0.dist-info/METADATA", METADATA)
    write(installed / "aorta-1.0.dist-info/entry_points.txt", ENTRY_POINTS)
    write(installed / "aorta/__init__.py", "")
    write(installed / "aorta/workloads/__init__.py", BASE)
    write(installed / "aorta/workloads/fsdp.py", CLASSES)
    write(tmp_path / "project/pytest.ini", "[pytest]\n")
    write(tmp_path / "project/test_inner.py", TESTS)
    path = ":".join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))
    environ = own_environ(tmp_path / "leases", PYTHONPATH=path)

    def run(*words: str) -> tuple[int, str]:
        ended = run_python("-m", *words, cwd=tmp_path / "project", env=environ)
        assert mentioning(str(tmp_path)) == []
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_class_of_aorta_is_launched_measured_and_compared(run, tmp_path):
    code, output = run(*PYTEST, "--update-baselines")
    assert code == 0, output
    # The costs of run() are those of six steps and two of warm-up; with an optimizer, costs are those of a step.
    for case, collectives in (("test_fsdp::aorta:fsdp", 8), ("test_trained::trained", 1)):
        recorded = output.partition(f"::{case} (")[2].partition("recorded ")[0]
        assert f"collectives: {collectives}\n" in recorded, output
        assert "overlap_ratio: " in recorded, output
    source = tmp_path / "installed/aorta/workloads/fsdp.py"
    source.write_text(source.read_text().replace('self.config.get("gathers", 1)', "2"))
    code, output = run(*PYTEST, "-k", "test_fsdp")
    assert code == 1
    assert "Regression: collectives +100% (8 -> 16, limit exact)" in output


def test_command_launches_a_class_of_aorta_with_steps_and_any_key(run, tmp_path):
    command = ["pytest_aorta.cli", "run", "--nproc", "2", "--gpus", "0", "--results", "kept", "--steps", "4"]
    code, output = run(*command, "--workload", "aorta:fsdp", "--set", "gathers=3")
    assert code == 0, output
    result = read_json(tmp_path / "project/kept/aorta-fsdp/trial_0.json")
    assert result["config"] == {"steps": 4, "gathers": 3, "environment": {}}
    assert len(result["step_times_ms"]) == 4
    known = run("pytest_aorta.cli", "run", "--workload", "unknown")[1]
    assert all(repr(name) in known for name in ("aorta:fsdp", "aorta:trained", "aorta:stuck", "fsdp"))
