"""Processes that tests of real launches wait for, look for and expect to be gone."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Upper limit of the time to start two ranks on two busy cores.
START_S = 150.0
# Time limits to reach a hang: the first suffices on idle cores; on busy cores, a launch is repeated with the next.
HANG_LIMITS_S = (12.0, 24.0, 48.0, 96.0)
WARM_LIMITS_S = (6.0, 24.0, 96.0)


def await_true(condition: Callable[[], object], limit_s: float = START_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def own_environ(leases: Path, **changes: str) -> dict[str, str]:
    """Return the environment of a run on CPU ranks, without variables of git and of the pytest around it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    return own | {"CUDA_VISIBLE_DEVICES": "", "AORTA_LEASE_DIR": str(leases)} | changes


def mentioning(text: str) -> list[int]:
    """Return ids of other processes whose command line, environment or working folder contains ``text``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            known = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            known += os.fsencode((entry / "cwd").readlink())
        except OSError:
            continue
        if text.encode() in known and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def _status(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process; a process that is gone counts as a zombie without a parent."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return "Z", 0
    return state, int(parent)


def is_alive(pid: int) -> bool:
    return _status(pid)[0] != "Z"


def parent_of(pid: int) -> int:
    return _status(pid)[1]


def living_children(pid: int) -> list[int]:
    found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [child for child in found if _status(child)[1] == pid and is_alive(child)]


def rank_pids(folder: Path) -> list[int]:
    """Return the process ids that ranks below a folder have left."""
    return [int(path.read_text()) for path in folder.rglob("ranks/*/pid")]


def ranks_left(folder: Path) -> list[int]:
    """Return the ids of processes of launches below a folder that still run."""
    # A rank that a fork server started has the server's command line and environment.
    return mentioning(str(folder)) + [pid for pid in rank_pids(folder) if is_alive(pid)]


def refused_namespaces(unshare: Sequence[str], programs: Sequence[str], trial: str) -> str | None:
    """Return which programs are missing, or why ``trial`` can't run in namespaces; None if nothing is in the way."""
    if absent := [name for name in programs if shutil.which(name) is None]:
        return f"programs {absent} are not installed"
    made = subprocess.run([*unshare, "sh", "-c", trial], capture_output=True, text=True)
    return None if made.returncode == 0 else f"namespaces are not allowed here: {made.stderr.strip()}"
