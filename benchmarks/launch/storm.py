"""A storm of 200 launches whose processes are killed or stopped at random; no process and no lease may be left.

Run: python -m benchmarks.launch.storm [--seed N] [--launches N] [--cold N] [--controllers N] [--limit S] [--gpus N]
     [--ranks N] [--budget S]

Pytest runs, ``-n 2 --update-baselines`` in a scratch folder, launch two ranks per test (or ``--ranks``), most of them
warm, on CPU or, with ``--gpus``, on N GPUs that both xdist workers share. Each rank has two children in sessions of
their own, one with an empty environment. Meanwhile ranks, their children, agents and fork servers get SIGKILL or
SIGSTOP, and guards and xdist workers get SIGKILL, one process in about two launches. Some runs end early, because
their xdist controller gets SIGKILL in the middle of its launches.

After each run, none of its processes and no lease may exist, and no GPU may list a process of the run or one that no
longer exists. After the last run, whose controller is not killed, each passed test that records a baseline has a
complete one, no other test has one, and each failure has a class. Otherwise, or if a run exceeds its time limit, the
benchmark fails. After ``--budget`` seconds the last run gets SIGINT, and the same holds for the tests that it has run.
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

import pynvml
import pytest

from pytest_aorta.common import variables
from pytest_aorta.common.errors import BaselineError, LeaseError
from pytest_aorta.launch.leases import cpu_slots, holders, lease
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.verdict.baseline import read_baseline_file

# Relative frequency of each kind of victim.
VICTIMS = {"rank": 8, "agent": 2, "guard": 3, "fork server": 1, "xdist worker": 1, "child of a rank": 1}
# Fraction of victims that get SIGSTOP. Nothing ends a run whose xdist worker or guard is stopped, so these are killed.
STOPPED = 0.2
KILLED = ("xdist worker", "guard")
# The launches of a run whose controller is killed, and the range of launches that begin before the kill.
SHORT_LAUNCHES = 20
LAUNCHES_BEFORE_END = (8, 16)
# Launches started between two kills, and the mean delay of the kill after the last start.
PAUSE_LAUNCHES = (1, 3)
MEAN_DELAY_S = 0.6
PATIENCE_S = 10.0
TICK_S = 0.05
# Every launch with a stopped process takes this long. Beside other work, a start can take longer. The benchmark then
# reports a failure without a cause, and needs a longer limit.
LAUNCH_LIMIT_S = 25
RUN_LIMIT_S = 1500
# A guard whose pytest was killed ends its ranks within SIGTERM's two seconds.
GONE_LIMIT_S = 15
LEASE_LIMIT_S = 60
PROGRAMS = {
    "process/guard.py": "guard",
    "process.torchrun": "agent",
    "process.rank": "rank",
    "sleep 177": "child of a rank",
}
UNKNOWN = "no class"
FORKED = ("guard", "agent", "rank")
# Failure classes of tests whose victims were killed: a rank, an agent, a guard, a fork server, an xdist worker.
CLASSES = {"signal", "rendezvous", "guard lost", "fork server lost", "xdist worker crashed"}
# Further failure classes, of tests whose victims were stopped: a rank or an agent, before or after the results.
CLASSES |= {"hang in collective", "hang elsewhere", "process left"}
# Text of a failure -> its class; None where the text contains the class.
FAILURES = {
    r"on \d (?:cpu|cuda) ranks?: ([a-z ]+): ": None,
    r"on \d (?:cpu|cuda) ranks?: rank \d failed first: signal ": "signal",
    r"worker '\w+' crashed": "xdist worker crashed",
    r"the fork server was lost": "fork server lost",
}
SCRIPT = """
import subprocess
import time
import torch
import torch.distributed as dist
from pytest_aorta.worker import RankEnv, recorder

subprocess.Popen(["sleep", "177"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
subprocess.Popen(["/bin/sleep", "177"], start_new_session=True, env={})
device = RankEnv.read().join("storm")
recorder.start(device)
for _ in range(20):
    with recorder.step():
        dist.all_reduce(torch.ones(1, device=device))
        time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""
TESTS = """
import pytest

def case(number):
    cold = number * {cold} // {launches} != (number + 1) * {cold} // {launches}
    return pytest.param(number, marks=pytest.mark.world(size={ranks}, device="{device}", warm=not cold))

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
        kills: Signals by kind of victim.
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
    """Return the kind of a process, by its program; their ancestors identify processes forked by a fork server."""
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


def hit_one(scratch: Path, controller_pid: int, kind: str, rng: random.Random) -> str | None:
    """Kill or stop a random process of a kind; return kind and signal, or None without a victim."""
    processes = processes_of(scratch)
    pids = [process.pid for process in processes.values() if kind_of(process, processes, controller_pid) == kind]
    if not pids:
        return None
    pid = rng.choice(pids)
    number = signal.SIGSTOP if kind not in KILLED and rng.random() < STOPPED else signal.SIGKILL
    with suppress(ProcessLookupError), ExitStack() as stack:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        # With the pidfd open, the process id can't be reused any more.
        if find_process(pid, scratch):
            signal.pidfd_send_signal(pidfd, number)
            return kind if number == signal.SIGKILL else f"{kind} stopped"
    return None


def prepare(scratch: Path, num_launches: int, num_cold: int, num_gpus: int, num_ranks: int) -> None:
    """Write the tests and their script."""
    (scratch / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (scratch / "train.py").write_text(SCRIPT, encoding="utf-8")
    device = "cuda" if num_gpus else "cpu"
    text = TESTS.format(launches=num_launches, cold=num_cold, device=device, ranks=num_ranks)
    (scratch / "test_storm.py").write_text(text, encoding="utf-8")


def start_pytest(scratch: Path, num_gpus: int, limit_s: int) -> subprocess.Popen[bytes]:
    """Start the pytest run whose processes are killed."""
    options = ["-n2", "--max-worker-restart=1000", "--update-baselines", f"--aorta-gpus={num_gpus}"]
    if not num_gpus:
        options.append("--aorta-gpus=0")
    paths = [f"--aorta-results={scratch / 'results'}", f"--junitxml={scratch / 'junit.xml'}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths]
    with (scratch / "pytest.log").open("wb") as log:
        return subprocess.Popen(
            [*command, f"--aorta-timeout={limit_s}"],
            cwd=scratch,
            env=os.environ | {variables.LEASE_DIR: str(scratch / "leases"), "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def disturb(
    scratch: Path,
    process: subprocess.Popen[bytes],
    rng: random.Random,
    last_launch: float = math.inf,
    budget_s: float = math.inf,
) -> Counter[str]:
    """Kill and stop processes until pytest has ended or its time is over; return signals by kind.

    The controller is killed when ``last_launch`` launches have begun, and gets SIGINT after ``budget_s`` seconds.
    """
    kills: Counter[str] = Counter()
    began_s, next_launch, at_s, kind = time.monotonic(), 1, math.inf, ""
    while time.monotonic() < began_s + min(RUN_LIMIT_S, budget_s):
        with suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
            return kills
        num_begun = len(list((scratch / "results").glob("*/*")))
        if num_begun >= last_launch:
            process.kill()
            process.wait()
            kills["controller"] += 1
            return kills
        if num_begun >= next_launch and at_s == math.inf:
            at_s = time.monotonic() + rng.expovariate(1 / MEAN_DELAY_S)
            [kind] = rng.choices(list(VICTIMS), list(VICTIMS.values()))
        # Wait for a kind that exists only for a short time, such as ranks.
        if time.monotonic() < at_s:
            continue
        if hit := hit_one(scratch, process.pid, kind, rng):
            kills[hit] += 1
        if hit or time.monotonic() > at_s + PATIENCE_S:
            next_launch, at_s = num_begun + rng.randint(*PAUSE_LAUNCHES), math.inf
    if time.monotonic() < began_s + RUN_LIMIT_S:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GONE_LIMIT_S)
            return kills
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
    """Return the outcome by name of each test that has ended; empty where pytest wrote no report."""
    try:
        cases = ElementTree.parse(scratch / "junit.xml").iter("testcase")
    except (OSError, ElementTree.ParseError):
        return {}
    # Tests that SIGINT has interrupted have no name.
    return {name: failure_of(case) for case in cases if (name := case.get("name"))}


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
    problems = [f"{name}: {failure}" for name, failure in failures.items() if failure not in CLASSES]
    if len(failures) > kills.total():
        problems.append(f"{len(failures)} tests failed after {kills.total()} kills")
    return problems


def number_of(name: str) -> int:
    """Return the number in a name such as ``test_launch[7]``."""
    return int(name.rpartition("[")[2].rstrip("]"))


def processes_on_gpus(scratch: Path) -> list[int]:
    """Return processes that a GPU lists, and that use the folder ``scratch`` or no longer exist."""
    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        pids = {entry.pid for handle in handles for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()
    return sorted(pid for pid in pids if find_process(pid, scratch) or not Path("/proc", str(pid)).exists())


def see_off(scratch: Path, num_gpus: int, left: list[str]) -> float:
    """Append the leftovers of a run to ``left``, and return the seconds until its last process was gone."""
    began_s = time.monotonic()
    # If a pytest process and a guard died together, the next pytest process that wants these devices ends their ranks.
    try:
        pool = tuple(device.uuid for device in visible_devices()[:num_gpus]) if num_gpus else cpu_slots()
        lease(pool, len(pool), exclusive=True, wait_s=LEASE_LIMIT_S, folder=scratch / "leases", owner="next").release()
    except LeaseError as error:
        left.append(str(error))
    left += [f"process {process}" for process in wait_until_gone(scratch).values()]
    if num_gpus:
        left += [f"process {pid} on a GPU" for pid in processes_on_gpus(scratch)]
    gone_s = time.monotonic() - began_s
    left += [f"lease {claim}" for claim in holders(scratch / "leases")]
    return gone_s


def storm(
    scratch: Path,
    num_launches: int,
    num_cold: int,
    num_controllers: int,
    seed: int,
    num_gpus: int = 0,
    num_ranks: int = 2,
    limit_s: int = LAUNCH_LIMIT_S,
    budget_s: float = math.inf,
) -> Storm:
    """Run the storm once in the empty folder ``scratch``; every run before the last one loses its controller.

    ``limit_s`` is the time limit of a launch of ``num_ranks``. With ``num_gpus`` 0, the ranks run on CPU. After
    ``budget_s`` seconds the last run is interrupted.
    """
    rng, began_s = random.Random(seed), time.monotonic()
    kills, launched, left, gone_s = Counter[str](), Counter[str](), list[str](), 0.0
    for number in range(num_controllers):
        run = scratch / str(number)
        run.mkdir()
        prepare(run, SHORT_LAUNCHES, 2, num_gpus, num_ranks)
        kills += disturb(run, start_pytest(run, num_gpus, limit_s), rng, rng.randint(*LAUNCHES_BEFORE_END))
        gone_s = max(gone_s, see_off(run, num_gpus, left))
        launched += launchers(run)
    run = scratch / "last"
    run.mkdir()
    num_launches -= launched.total()
    prepare(run, num_launches, num_cold, num_gpus, num_ranks)
    pytest_process = start_pytest(run, num_gpus, limit_s)
    budget_left_s = began_s + budget_s - time.monotonic()
    kills_of_run = disturb(run, pytest_process, rng, budget_s=budget_left_s)
    is_interrupted = time.monotonic() > began_s + budget_s
    gone_s = max(gone_s, see_off(run, num_gpus, left))
    ended_s = time.monotonic()
    outcomes = read_outcomes(run)
    left += damaged_baselines(run, outcomes)
    left += unexplained(outcomes, kills_of_run)
    # While pytest starts, SIGINT ends it without a report.
    expected = (pytest.ExitCode.INTERRUPTED, -signal.SIGINT) if is_interrupted else (0, 1)
    if pytest_process.returncode not in expected or (len(outcomes) != num_launches and not is_interrupted):
        left.append(f"pytest ended with {pytest_process.returncode}, {len(outcomes)} of {num_launches} tests reported")
    return Storm(
        wall_s=ended_s - began_s,
        gone_s=gone_s,
        launched=launched + launchers(run),
        kills=kills + kills_of_run,
        outcomes=Counter(outcomes.values()),
        num_baselines=len(list((run / "baselines").glob("*/*.json"))),
        left=tuple(left),
    )


def table(result: Storm) -> str:
    """Return the figures, one row each."""
    rows = [
        ("launches", result.launched),
        ("signals", result.kills),
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
    """Print the table; return 1 if something was left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--cold", type=int, default=30)
    parser.add_argument("--controllers", type=int, default=3, help="runs whose xdist controller is killed")
    parser.add_argument("--limit", type=int, default=LAUNCH_LIMIT_S, help="time limit of a launch in seconds")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the launches share; 0: CPU ranks")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a launch")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which the last run is interrupted"
    )
    parser.add_argument("--keep", action="store_true", help="leave the scratch folder where it is")
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="aorta-storm-")).resolve()
    result = storm(
        scratch,
        asked.launches,
        asked.cold,
        asked.controllers,
        asked.seed,
        asked.gpus,
        asked.ranks,
        asked.limit,
        asked.budget,
    )
    print(table(result))
    if asked.keep or result.left:
        print(f"kept: {scratch}")
    else:
        shutil.rmtree(scratch)
    sys.exit(bool(result.left))


if __name__ == "__main__":
    main()
