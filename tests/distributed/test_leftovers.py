"""Processes of ranks whose guard is killed: all of them end, and the devices are leased until then."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.launch.launchers import Launchers
from pytest_aorta.launch.leases import holders, lease
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.result.folder import rank_pids
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.distributed.processes import START_S, await_true, is_alive, parent_of
from tests.unit.builders import make_script_plan

# By what a search of the host's processes would find them; only its ancestors identify the last one.
KINDS = ("program", "program without environment", "fork", "program without environment and log")
# Starts the processes in sessions of their own, and leaves their ids.
SCRIPT = """
import os, subprocess, time
from pathlib import Path

child = os.fork()
if child == 0:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    time.sleep(177)
pids = [
    subprocess.Popen(["sleep", "177"], start_new_session=True, stdout=-3, stderr=-3).pid,
    subprocess.Popen(["/bin/sleep", "177"], start_new_session=True, env={}).pid,
    child,
    subprocess.Popen(["/bin/sleep", "177"], start_new_session=True, env={}, stdin=-3, stdout=-3, stderr=-3).pid,
]
Path(os.environ["AORTA_RANK_FOLDER"], "children.tmp").write_text(" ".join(map(str, pids)))
Path(os.environ["AORTA_RANK_FOLDER"], "children.tmp").rename(Path(os.environ["AORTA_RANK_FOLDER"], "children"))
time.sleep(600)
"""
# A stand-in for a pytest process, which takes the lease and launches.
HOLDER = """
import sys
from msgspec.structs import replace
from pathlib import Path
from pytest_aorta.launch.leases import lease
from pytest_aorta.launch.launchers import Launchers
from tests.distributed.test_leftovers import make_plan

folder = Path(sys.argv[1])
with lease(("cpu-0",), 1, exclusive=False, wait_s=5, folder=folder / "leases", owner="dead") as held:
    Launchers().launch(replace(make_plan(folder, sys.argv[2]), lease_fds=held.fds))
"""
ROOT = Path(__file__).parents[2]


def make_plan(folder: Path, launcher: str) -> LaunchPlan:
    return make_script_plan(folder, SCRIPT, timeout_s=START_S, cwd=ROOT, launcher=LauncherKind(launcher))


def started(run_dir: Path) -> dict[str, list[int]]:
    """Wait for the processes of both ranks, and return their ids by kind."""
    files = [run_dir / "ranks" / rank / "children" for rank in ("0", "1")]
    await_true(lambda: all(file.exists() for file in files))
    ranks = [[int(pid) for pid in file.read_text().split()] for file in files]
    found = {kind: [pids[number] for pids in ranks] for number, kind in enumerate(KINDS)}
    assert all(is_alive(pid) for pids in found.values() for pid in pids)
    return found


def guard_of(run_dir: Path) -> int:
    keeper = parent_of(parent_of(int((run_dir / "ranks" / "0" / "pid").read_text())))
    return parent_of(keeper)


def alive(children: dict[str, list[int]]) -> list[str]:
    return [kind for kind, pids in children.items() if any(map(is_alive, pids))]


@pytest.mark.parametrize("launcher", [LauncherKind.TORCHRUN, LauncherKind.FORKSERVER])
def test_lost_guard_leaves_nothing_that_a_rank_has_started(tmp_path, servers, launcher):
    plan, outcomes = make_plan(tmp_path, launcher), list[LaunchOutcome]()
    with lease(("cpu-0",), 1, exclusive=False, wait_s=5, folder=tmp_path / "leases", owner="test") as held:
        plan = replace(plan, lease_fds=held.fds)
        thread = threading.Thread(target=lambda: outcomes.append(servers.launch(plan)))
        thread.start()
        children = started(plan.run_dir)
        os.kill(guard_of(plan.run_dir), signal.SIGKILL)
        thread.join(START_S)
        assert alive(children) == []
    assert holders(tmp_path / "leases") == []
    [outcome] = outcomes
    assert (outcome.reason, outcome.launcher, outcome.survivors) == (EndReason.GUARD_LOST, launcher, ())


def test_ranks_end_with_the_guard_and_its_keeper(tmp_path):
    plan, outcomes = make_plan(tmp_path, LauncherKind.TORCHRUN), list[LaunchOutcome]()
    thread = threading.Thread(target=lambda: outcomes.append(Launchers().launch(plan)))
    thread.start()
    children = started(plan.run_dir)
    ranks = rank_pids(plan.run_dir).values()
    guard = guard_of(plan.run_dir)
    for pid in (guard, parent_of(parent_of(min(ranks)))):
        os.kill(pid, signal.SIGKILL)
    thread.join(START_S)
    assert not any(map(is_alive, ranks))
    assert [(outcome.reason, outcome.survivors) for outcome in outcomes] == [(EndReason.GUARD_LOST, ())]
    for pid in (pid for pids in children.values() for pid in pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", [LauncherKind.TORCHRUN, LauncherKind.FORKSERVER])
def test_devices_of_a_dead_pytest_are_leased_when_their_processes_are_gone(tmp_path, launcher):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), launcher], cwd=ROOT)
    children = started(tmp_path / "run")
    guard = guard_of(tmp_path / "run")
    os.kill(guard, signal.SIGSTOP)
    holder.kill()
    holder.wait()
    assert [holder.owner.partition(" (pid")[0] for holder in holders(tmp_path / "leases")] == ["dead"]
    os.kill(guard, signal.SIGKILL)
    with lease(("cpu-0",), 1, exclusive=False, wait_s=60, folder=tmp_path / "leases", owner="next"):
        assert alive(children) == []
        assert [holder.owner.partition(" (pid")[0] for holder in holders(tmp_path / "leases")] == ["next"]
