"""Real ranks beside pytest-timeout, pytest-cov and a debugger: no rank is left running or measured while traced."""

import shutil
import subprocess

import pytest

from pytest_aorta.common import variables
from pytest_aorta.launch.leases import holders
from pytest_aorta.result.folder import steps_entered
from pytest_aorta.result.reading import read_result
from tests.distributed.processes import await_true, ranks_left
from tests.distributed.test_faults import ROOT, WORKLOADS
from tests.unit.builders import nightly, run_python

HANG = """
import pytest

@pytest.mark.timeout({limit_s}, method="{method}")
def test_hang(workload):
    workload.run("faulty", kind="absent")

def test_after(distributed_world):
    assert distributed_world.run("faulty", kind="none").passed
"""
# Time limits to reach the hang: the first suffices on idle cores; on busy cores, the run is repeated with the next.
LIMITS_S = (15, 45, 135)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A folder with an ini file, and a function that runs pytest there with leases of its own."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv(variables.LEASE_DIR, str(tmp_path / "leases"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naorta_workloads = {WORKLOADS}\n")

    def run(*options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        options = (f"--aorta-results={tmp_path / 'results'}", "--aorta-launcher=forkserver", *options)
        return run_python("-m", "pytest", "-p", "no:cacheprovider", *options, cwd=tmp_path, input=stdin)

    return tmp_path, run


def run_into_hang(suite, method: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Return the first run whose ranks had all reached the hang when pytest-timeout ended the test."""
    folder, run = suite
    for limit_s in LIMITS_S:
        (folder / "test_inner.py").write_text(HANG.format(limit_s=limit_s, method=method))
        ended = run(*options)
        if sum(steps_entered(rank) > 1 for rank in folder.glob("results/*test-hang*/*/ranks/*")) == 2:
            break
        await_true(lambda: ranks_left(folder / "results") == [], limit_s=60)
        shutil.rmtree(folder / "results")
    return ended


def test_launch_that_pytest_timeout_ends_leaves_no_rank_and_no_lease(suite):
    folder, _ = suite
    ended = run_into_hang(suite, "signal")
    assert "1 failed, 1 passed" in ended.stdout
    [stuck] = folder.glob("results/test-inner-py-test-hang-*/01-faulty-*")
    assert f"launch of 'faulty' ended before its limit of 300 s; see {stuck}" in ended.stdout
    assert "in absent" in (stuck / "ranks/1/stacks.txt").read_text()
    assert ranks_left(folder / "results") == []
    assert holders() == []


@pytest.mark.parametrize("launcher", ["torchrun", nightly("forkserver")])
def test_guard_ends_the_launch_of_a_pytest_that_pytest_timeout_kills(suite, launcher):
    folder, _ = suite
    ended = run_into_hang(suite, "thread", f"--aorta-launcher={launcher}")
    assert ended.returncode == 1
    # pytest-timeout writes the stacks of pytest's threads, and ends the process at once.
    assert "Stack of MainThread" in ended.stderr + ended.stdout
    assert "failed" not in ended.stdout
    assert len(list(folder.glob("results/*/*/ranks/*/pid"))) == 2
    await_true(lambda: ranks_left(folder / "results") == [], limit_s=60)
    await_true(lambda: holders() == [], limit_s=60)


# A debugger that, when it opens, writes which processes are left.
LOOK = """
import pathlib
from tests.distributed.processes import ranks_left

class Look:
    def __init__(self, *args, **kwargs):
        pass

    def reset(self):
        pass

    def interaction(self, frame, traceback):
        pathlib.Path("left").write_text(repr(ranks_left(pathlib.Path.cwd() / "results")))
"""


def test_debugger_opens_after_the_last_rank_of_a_failed_launch_has_ended(suite):
    folder, run = suite
    (folder / "look.py").write_text(LOOK)
    (folder / "test_inner.py").write_text("def test_fault(workload): workload.run('faulty', kind='exception')\n")
    ended = run("--pdb", "--pdbcls=look:Look")
    assert "1 failed" in ended.stdout
    assert (folder / "left").read_text() == "[]"


TRAIN = """
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
for _ in range(3):
    with recorder.step():
        model(torch.ones(2)).sum().backward()
"""
COMPARED = """
import pytest

@pytest.mark.tolerance(step_time_p50="5%")
def test_train(workload):
    workload.check(workload.run_script("train.py"))
"""


@pytest.mark.parametrize(
    ("patch", "tracer", "covered"),
    [("subprocess, _exit", "coverage", "100%"), nightly("", None, "0%")],
    ids=["ranks traced", "pytest alone"],
)
def test_coverage_of_ranks_makes_their_times_not_applicable(suite, patch, tracer, covered):
    folder, run = suite
    (folder / "train.py").write_text(TRAIN)
    (folder / "test_inner.py").write_text(COMPARED)
    (folder / ".coveragerc").write_text(f"[run]\nsource = .\nparallel = true\npatch = {patch}\n")
    ended = run("--cov", "--aorta-fail-on=none")
    assert "1 passed" in ended.stdout
    [result] = folder.glob("results/*/01-*/result.json")
    found = read_result(result).environment.get("python_tracer")
    assert (found and found.partition(".")[0]) == tracer
    assert ("(profiler)" in ended.stdout) is (tracer is not None)
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("train.py")]
    assert line.split()[-1] == covered
