"""A storm of 100 launches whose processes are killed at random, which must leave no process and no lease.

Run: python -m benchmarks.launch.storm [--seed N] [--launches N] [--cold N]

A separate pytest run, ``-n 2 --update-baselines`` in a scratch folder, launches two CPU ranks per test, most of them
warm. Meanwhile ranks, agents, guards, fork servers and xdist workers get SIGKILL, one in about two launches. Afterwards
no process and no lease of the storm may exist, each passed test that records a baseline has a whole one and no other
test has any, and each failure has a class. The benchmark fails otherwise, or if the run exceeds its time limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import BaselineError
from pytest_aorta.launch.lease.lease import holders
from pytest_aorta.verdict.baseline import read_baseline_file

# Relative frequency of each kind of victim, where one exists.
VICTIMS = {"rank": 4, "agent": 2, "guard": 2, "fork server": 1, "xdist worker": 1}
# Launches started between two kills, and the mean delay of the kill after the last start.
PAUSE_LAUNCHES = (1, 3)
MEAN_DELAY_S = 0.6
TICK_S = 0.05
LAUNCH_LIMIT_S = 60
RUN_LIMIT_S = 480
# A guard whose pytest was killed ends its ranks within SIGTERM's two seconds.
GONE_LIMIT_S = 15
PROGRAMS = {"process/guard.py": "guard", "process.torchrun": "agent", "process.rank": "rank"}
UNKNOWN = "no class"
FORKED = ("guard", "agent", "rank")
# Victim -> the failure class of a test whose victim was killed.
CLASSES = {
    "rank": "signal",
    "agent": "rendezvous",
    "guard": "guard lost",
    "fork server": "fork server lost",
    "xdist worker": "xdist worker crashed",
}
# Text of a failure -> its class; None where the text contains the class.
FAILURES = {
    r"on 2 cpu ranks: ([a-z ]+): ": None,
    r"worker '\w+' crashed": "xdist worker crashed",
    r"the fork server was lost": "fork server lost",
}
SCRIPT = """
import time
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
recorder.start(torch.device("cpu"))
for _ in range(5):
    with recorder.step():
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""
TESTS = """
import pytest

def case(number):
    cold = number * {cold} // {launches} != (number + 1) * {cold} // {launches}
    return pytest.param(number, marks=pytest.mark.world(size=2, device="cpu", warm=not cold))

@pytest.mark.parametrize("number", map(case, range({launches})))
def test_launch(workload, number):
    result = workload.run_script("train.py")
    if number % 2:
        workload.check(result)
"""


@dataclass(frozen=True)
class Process:
    """A living process of the storm."""

    pid: int
    parent: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Storm:
    """Events of the storm, and leftovers.

    Attributes:
        launched: Launches by launcher, without launches whose pytest process was killed.
        kills: Kills by kind of victim.
        outcomes: Tests by class of failure.
        left: Processes, leases and baselines that must not exist.
    """

    wall_s: float
    gone_s: float
    launched: Counter[str]
    kills: Counter[str]
    outcomes: Counter[str]
    num_baselines: int
    left: tuple[str, ...]


def find_process(pid: int, scratch: Path) -> Process | None:
    """Return the process if it is alive and its command, environment or working folder contains ``scratch``."""
    entry = Path("/proc", str(pid))
    with suppress(OSError):
        command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        if str(scratch).encode() in command + environ or (entry / "cwd").readlink().is_relative_to(scratch):
            # The program's name can contain spaces and parentheses: fields are counted from the last parenthesis.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            return Process(pid, parent, tuple(command.decode(errors="replace").rstrip("\0").split("\0")))
    return None


def processes_of(scratch: Path) -> dict[int, Process]:
    """Return every living process of the storm except this process, by id."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = (find_process(pid, scratch) for pid in pids if pid != os.getpid())
    return {process.pid: process for process in found if process}


def kind_of(process: Process, processes: dict[int, Process], controller_pid: int) -> str | None:
    """Return the kind of a process, by its program; processes forked by a fork server are known by their ancestors."""
    if process.parent == controller_pid:
        # A worker that has not started a launch yet is not a victim.
        is_busy = any(other.parent == process.pid for other in processes.values())
        return "xdist worker" if is_busy else None
    program = " ".join(process.command)
    if "process.forkserver" not in program:
        return next((kind for name, kind in PROGRAMS.items() if name in program), None)
    if process.command[-1] == str(process.parent):
        return "fork server"
    above = kind_of(processes[process.parent], processes, controller_pid) if process.parent in processes else None
    # The guard of a launch that has lost its fork server has no parent in the storm.
    return FORKED[min(FORKED.index(above) + 1, 2)] if above in FORKED else "guard"


def kill_one(scratch: Path, controller_pid: int, rng: random.Random) -> str | None:
    """Send SIGKILL to a random process of a random kind; return the kind, or None without a victim."""
    processes = processes_of(scratch)
    by_kind: dict[str | None, list[int]] = {}
    for process in processes.values():
        by_kind.setdefault(kind_of(process, processes, controller_pid), []).append(process.pid)
    kinds = [kind for kind in VICTIMS if kind in by_kind]
    if not kinds:
        return None
    [kind] = rng.choices(kinds, [VICTIMS[kind] for kind in kinds])
    pid = rng.choice(by_kind[kind])
    with suppress(ProcessLookupError), ExitStack() as stack:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        # With the pidfd open, the process id can't be reused any more.
        if find_process(pid, scratch):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return kind
    return None


def prepare(scratch: Path, num_launches: int, num_cold: int) -> None:
    """Write the tests and their script."""
    (scratch / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (scratch / "train.py").write_text(SCRIPT, encoding="utf-8")
    text = TESTS.format(launches=num_launches, cold=num_cold)
    (scratch / "test_storm.py").write_text(text, encoding="utf-8")


def start_pytest(scratch: Path) -> subprocess.Popen[bytes]:
    """Start the pytest run whose processes are killed."""
    options = ["-n2", "--max-worker-restart=1000", "--update-baselines", "--aorta-gpus=0", "--aorta-device=cpu"]
    paths = [f"--aorta-results={scratch / 'results'}", f"--junitxml={scratch / 'junit.xml'}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths]
    with (scratch / "pytest.log").open("wb") as log:
        return subprocess.Popen(
            [*command, f"--aorta-timeout={LAUNCH_LIMIT_S}"],
            cwd=scratch,
            env=os.environ | {variables.LEASE_DIR: str(scratch / "leases"), "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def disturb(scratch: Path, process: subprocess.Popen[bytes], rng: random.Random) -> Counter[str]:
    """Kill until pytest has ended or its time is over; return kills by kind."""
    kills: Counter[str] = Counter()
    deadline_s, next_launch, at_s = time.monotonic() + RUN_LIMIT_S, 1, math.inf
    while time.monotonic() < deadline_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
            return kills
        num_begun = len(list((scratch / "results").glob("*/*")))
        if num_begun >= next_launch:
            at_s = min(at_s, time.monotonic() + rng.expovariate(1 / MEAN_DELAY_S))
        if time.monotonic() >= at_s and (kind := kill_one(scratch, process.pid, rng)):
            kills[kind] += 1
            next_launch, at_s = num_begun + rng.randint(*PAUSE_LAUNCHES), math.inf
    process.kill()
    process.wait()
    return kills


def wait_until_gone(scratch: Path) -> dict[int, Process]:
    """Return the processes that are alive after the time to end."""
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while (processes := processes_of(scratch)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return processes


def failure_of(case: ElementTree.Element) -> str:
    """Return the class of a test's failure, or ``passed``."""
    problems = [entry for entry in case if entry.tag in ("failure", "error", "skipped")]
    if not problems:
        return "passed"
    text = " ".join(f"{entry.get('message')} {entry.text}" for entry in problems)
    for pattern, name in FAILURES.items():
        if match := re.search(pattern, text):
            return name or match[1]
    return UNKNOWN


def read_outcomes(scratch: Path) -> dict[str, str]:
    """Return each test's outcome by its name; empty where pytest did not finish."""
    try:
        cases = ElementTree.parse(scratch / "junit.xml").iter("testcase")
    except (OSError, ElementTree.ParseError):
        return {}
    return {str(case.get("name")): failure_of(case) for case in cases}


def launchers(scratch: Path) -> Counter[str]:
    """Return the number of launches by launcher."""
    found: Counter[str] = Counter()
    for run_dir in (scratch / "results").glob("*/*"):
        outcome = run_dir / "outcome.json"
        found[json.loads(outcome.read_bytes())["launcher"] if outcome.exists() else "cut short"] += 1
    return found


def damaged_baselines(scratch: Path, outcomes: dict[str, str]) -> list[str]:
    """Return errors of the baselines: unreadable, missing, of a failed test, or not whole."""
    recorded, problems = [], []
    for path in sorted((scratch / "baselines").rglob("*")):
        if path.is_file():
            try:
                recorded.append(read_baseline_file(path).test.split("::")[-1])
            except BaselineError as error:
                problems.append(str(error))
    wanted = [name for name, failure in outcomes.items() if failure == "passed" and number_of(name) % 2]
    problems += [f"baseline of {name} is lacking" for name in sorted(set(wanted) - set(recorded))]
    return problems + [f"baseline of {name}, which failed" for name in sorted(set(recorded) - set(wanted))]


def unexplained(outcomes: dict[str, str], kills: Counter[str]) -> list[str]:
    """Return failures that no kill has caused, or whose class is not the kill's."""
    failures = {name: failure for name, failure in outcomes.items() if failure != "passed"}
    problems = [f"{name}: {failure}" for name, failure in failures.items() if failure not in CLASSES.values()]
    if len(failures) > kills.total():
        problems.append(f"{len(failures)} tests failed after {kills.total()} kills")
    return problems


def number_of(name: str) -> int:
    """Return the number in a name such as ``test_launch[7]``."""
    return int(name.rpartition("[")[2].rstrip("]"))


def storm(scratch: Path, num_launches: int, num_cold: int, seed: int) -> Storm:
    """Run the storm once in the empty folder ``scratch``."""
    prepare(scratch, num_launches, num_cold)
    began_s = time.monotonic()
    pytest_process = start_pytest(scratch)
    kills = disturb(scratch, pytest_process, random.Random(seed))
    ended_s = time.monotonic()
    left = [f"process {process}" for process in wait_until_gone(scratch).values()]
    gone_s = time.monotonic() - ended_s
    left += [f"lease {claim}" for claim in holders(scratch / "leases")]
    outcomes = read_outcomes(scratch)
    left += damaged_baselines(scratch, outcomes)
    left += unexplained(outcomes, kills)
    if len(outcomes) != num_launches or pytest_process.returncode not in (0, 1):
        left.append(f"pytest ended with {pytest_process.returncode}, {len(outcomes)} of {num_launches} tests reported")
    return Storm(
        wall_s=ended_s - began_s,
        gone_s=gone_s,
        launched=launchers(scratch),
        kills=kills,
        outcomes=Counter(outcomes.values()),
        num_baselines=len(list((scratch / "baselines").glob("*/*.json"))),
        left=tuple(left),
    )


def table(result: Storm) -> str:
    """Return the figures, one row each."""
    rows = [
        ("launches", result.launched),
        ("kills", result.kills),
        ("tests", result.outcomes),
        ("baselines, whole", {"": result.num_baselines}),
        ("left or wrong", {"": len(result.left)}),
    ]
    lines = []
    for name, counts in rows:
        parts = ", ".join(f"{kind} {count}" for kind, count in Counter(counts).most_common() if kind)
        lines.append(f"{name:18} {sum(counts.values()):4}  {parts}".rstrip())
    lines.append(f"{'wall time':18} {result.wall_s:4.0f} s, all processes gone {result.gone_s:.1f} s later")
    return "\n".join([*lines, *(f"  {problem}" for problem in result.left)])


def main() -> None:
    """Print the table; return 1 where something was left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--cold", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help="leave the scratch folder where it is")
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="aorta-storm-")).resolve()
    result = storm(scratch, asked.launches, asked.cold, asked.seed)
    print(table(result))
    if asked.keep or result.left:
        print(f"kept: {scratch}")
    else:
        shutil.rmtree(scratch)
    sys.exit(bool(result.left))


if __name__ == "__main__":
    main()
