"""Claims of processes that a waiting request must not judge by their process ids alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch import leases as leasing
from pytest_aorta.launch.leases import Lease, holders, lease, record_launch
from pytest_aorta.launch.sweep import launch_id, pid_namespace, start_ticks

UNSHARE = ("unshare", "--user", "--map-current-user", "--pid", "--fork")
FIELDS = ("pid_namespace", "start_ticks")
HOLDER = """
import sys
from pathlib import Path
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch.leases import lease
with lease(["cpu-0"], 1, exclusive=False, wait_s=0, folder=Path(sys.argv[1]), owner="container"):
    print(flush=True)
    sys.stdin.read()
"""
has_namespaces = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="the kernel lets this user create no PID namespace",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Provide a process of the launch in the folder ``run``."""
    environ = os.environ | {variables.LAUNCH_ID: launch_id(tmp_path / "run")}
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        yield process
        process.kill()


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.fixture
def wait_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Lease]:
    """Provide a request that ends launches of dead processes without delay."""
    monkeypatch.setattr(leasing, "STOP_S", -1.0)
    return lambda: lease(["cpu-0"], 1, exclusive=False, wait_s=0.3, folder=folder, owner="this test")


def hold(folder: Path, **changes: int) -> Lease:
    """Return a lease with one launch, whose claim has other values of these fields, or lacks those given as -1."""
    held = lease(["cpu-0"], 1, exclusive=False, wait_s=0, folder=folder, owner="holder")
    [file] = folder.glob("*.claim")
    claim = json.loads(file.read_text().splitlines()[-1]) | changes
    file.write_text(json.dumps({name: value for name, value in claim.items() if value != -1}) + "\n")
    record_launch(held.fds[0], folder.parent / "run")
    return held


def test_launch_of_a_dead_process_is_ended_while_its_claim_is_held(folder, rank, ended_pid, wait_for):
    with hold(folder, pid=ended_pid), pytest.raises(LeaseError, match=rf"\(pid {ended_pid}, dead, but"):
        wait_for()
    assert rank.wait(10) < 0


@pytest.mark.parametrize(
    ("changes", "process"),
    [
        pytest.param({"pid_namespace": 7}, " of another PID namespace", id="another namespace"),
        pytest.param(dict.fromkeys(FIELDS, -1), "", id="claim of an older version"),
    ],
)
def test_process_that_can_not_be_judged_keeps_its_ranks_and_its_lease(
    folder, rank, ended_pid, wait_for, changes, process
):
    with hold(folder, pid=ended_pid, **changes):
        with pytest.raises(LeaseError, match=rf"held by holder \(pid {ended_pid}{process}, since"):
            wait_for()
        assert rank.poll() is None


def test_free_claim_of_another_namespace_keeps_its_ranks_and_its_lease(folder, rank, wait_for):
    """Its launch may have the run folder of a launch of this namespace, whose ranks would be ended in its place."""
    hold(folder, pid_namespace=7).release()
    with pytest.raises(LeaseError, match="of another PID namespace"):
        wait_for()
    assert rank.poll() is None


def test_process_id_that_another_process_uses_now_is_that_of_a_dead_process(folder, rank, wait_for):
    with hold(folder, start_ticks=start_ticks(os.getpid()) + 1):
        with pytest.raises(LeaseError, match=rf"\(pid {os.getpid()}, dead, but"):
            wait_for()
        assert rank.wait(10) < 0


@has_namespaces
@pytest.mark.parametrize(("options", "is_known"), [(["--mount-proc"], True), ([], False)])
def test_claim_names_the_namespace_of_the_process_ids_that_proc_shows(folder, options, is_known):
    command = [*UNSHARE, *options, sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == b"\n"
        [claim] = holders(folder)
        container.communicate()
    assert (claim.pid_namespace != 0) is is_known
    assert claim.pid_namespace != pid_namespace()
    assert (claim.is_local, claim.is_dead) == (False, False)
