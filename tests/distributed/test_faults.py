"""The fault matrix: every fault is reported with its class and the first failing rank, and leaves no process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.common.text import is_harness
from pytest_aorta.launch.guarded import launch
from pytest_aorta.launch.leases import holders
from pytest_aorta.plan.launch_plan import LaunchPlan, Limits
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.evidence import read_evidence
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result
from tests.distributed.processes import (
    HANG_LIMITS_S,
    START_S,
    WARM_LIMITS_S,
    await_true,
    is_alive,
    mentioning,
    parent_of,
    rank_pids,
    ranks_left,
    refused_namespaces,
)
from tests.unit import builders
from tests.unit.builders import each_of, make_script_plan, nightly

ROOT = Path(__file__).parents[2]
WORKLOADS = Path(__file__).parent / "workloads"
SHORT = Limits(error_grace_s=2, output_cap_bytes=32 << 20)

# kind -> class, first failing rank, a part of the text
MATRIX = {
    "exception": ("rank exception", 1, "ValueError: boom"),
    "exit_code": ("exit code", 1, "exit code 3"),
    "segfault": ("signal", 1, "signal SIGSEGV"),
    "killed": ("signal", 1, "signal SIGKILL"),
    "kill_agent": ("rendezvous", None, "torchrun ended with signal SIGKILL before any rank failed"),
    "full_disk": ("exit code", 1, "exit code 1"),
    "full_disk_at_result": ("rank exception", 1, "OSError: [Errno 27] File too large"),
    "nan_result": ("rank exception", 1, "NotFinite: metric metric_nan of rank 1 is nan"),
    "nan_parameter": (
        "rank exception",
        1,
        "NotFinite: parameter model.weight of rank 1 has 1 of 6 elements that are NaN or infinite",
    ),
    "one_long_line": ("output cap", 1, "logs exceed 32 MiB, rank 1 wrote most"),
    "suspended": ("hang in collective", 1, "gave up waiting for rank 1"),
    "given_up": ("hang in collective", 1, "rank 1, step 2: gil ("),
    "awaited": ("hang in collective", 1, "rank 1, step 2: absent ("),
    "done_alone": ("hang elsewhere", 1, "a rank was done for 3 s and others were not"),
}
# These faults end at the time limit.
HANGS = {
    # Where ranks start fast, the collective's own limit of 80% of the launch's ends first, and rank 0 gave up waiting.
    "absent": ("hang in collective", 1, " for rank 1"),
    "gil": ("hang in collective", 1, "gil ("),
    "grandchildren": ("hang in collective", 1, "grandchildren ("),
}


def make_plan(folder: Path, kind: str, timeout_s: float = START_S) -> LaunchPlan:
    folder.mkdir(exist_ok=True)
    spec = find_workload("faulty", [WORKLOADS])
    # Only a rank that hangs may be late: on busy cores, a rank can end seconds after another.
    limits = replace(SHORT, straggler_s=3) if kind == "done_alone" else SHORT
    return builders.make_plan(
        folder / "run",
        name="faulty",
        spec=spec,
        config=resolve_config(spec, {"kind": kind}),
        script=None,
        timeout_s=timeout_s,
        cwd=folder,
        limits=limits,
    )


def failed(plan: LaunchPlan, bound_s: float, start: Callable[[LaunchPlan], LaunchOutcome] = launch):
    began_s = time.monotonic()
    outcome = start(plan)
    took_s = time.monotonic() - began_s
    assert outcome.launcher == plan.launcher
    assert outcome.survivors == ()
    assert ranks_left(plan.run_dir) == []
    assert took_s < bound_s
    failure = launch_failure(plan, outcome)
    assert failure is not None
    return failure


# Faults that differ from another kind only in their cause, or whose stacks a unit test shows.
VARIANTS = {"exit_code", "full_disk_at_result", "gil", "grandchildren"}


# Kinds whose diagnosis reads the files of ranks, whoever started the ranks: warm in CI, cold every night.
WARM = ("exception", "segfault", "full_disk", "nan_result", "nan_parameter", "one_long_line", "suspended", "done_alone")
# Every night warm; those that CI does not start cold too.
NIGHTLY = ("given_up", "awaited", "exit_code", "killed")


def marks(kind: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.extended] if kind in {*VARIANTS, *WARM, *NIGHTLY} else []


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        *(pytest.param(kind, LauncherKind.FORKSERVER, id=f"{kind}, warm") for kind in WARM),
        *(nightly(kind, LauncherKind.FORKSERVER, id=f"{kind}, warm") for kind in NIGHTLY),
        *(pytest.param(kind, LauncherKind.TORCHRUN, id=kind, marks=marks(kind)) for kind in MATRIX),
    ],
)
def test_fault_is_classified_with_its_rank_and_leaves_no_process(tmp_path, servers, kind, launcher):
    expected_kind, rank, part = MATRIX[kind]
    # All share one working directory, since a fork server serves only one.
    plan = replace(make_plan(tmp_path, kind), launcher=launcher, cwd=ROOT)
    failure = failed(plan, START_S, servers.launch)
    assert (failure.kind, failure.rank) == (expected_kind, rank), failure.text
    assert failure.text.count(part) == 1, failure.text
    assert not any(map(is_harness, re.findall(r'File "([^"]*)"', failure.text))), failure.text


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in HANGS])
def test_hang_ends_at_the_time_limit_and_names_the_rank_that_is_missing(tmp_path, kind):
    expected_kind, rank, part = HANGS[kind]
    for limit_s in HANG_LIMITS_S:
        plan = make_plan(tmp_path / f"{limit_s:g}", kind, limit_s)
        failure = failed(plan, limit_s + 60)
        if (failure.kind, failure.rank) == (expected_kind, rank):
            break
    assert (failure.kind, failure.rank) == (expected_kind, rank), failure.text
    assert part in failure.text


# Trains under DDP and gathers the loss of each step; a handler of SIGTERM broadcasts, as Lightning's does.
ORDINARY = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def hold():
    time.sleep(600)

def spin():
    while True:
        pass

signal.signal(signal.SIGTERM, lambda *_: dist.broadcast(torch.zeros(1), 0))
dist.init_process_group("gloo")
rank, fault = dist.get_rank(), sys.argv[1]
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(1, 9):
    loss = model(torch.ones(2, 8)).mean()
    if step == 5:
        Path(__file__).with_name(f"reached.{rank}").touch()
    if step == 5 and fault == "sleeps" and rank == 1:
        hold()
    if step == 5 and fault == "raises":
        if rank == 0:
            spin()
        while not Path(__file__).with_name("reached.0").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        raise ValueError("boom")
    loss.backward()
    if not (step == 5 and fault == "skips" and rank == 1):
        dist.all_gather([torch.zeros(()), torch.zeros(())], loss.detach())
"""


def ordinary(folder: Path, fault: str, timeout_s: float, launcher: LauncherKind) -> LaunchPlan:
    changes = {"args": (fault,), "limits": SHORT, "launcher": launcher, "cwd": ROOT}
    return make_script_plan(folder, ORDINARY, timeout_s=timeout_s, **changes)


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("sleeps", "rank 0 waits for rank 1, which never entered gloo:all_reduce number "),
        ("skips", "ranks entered different collectives: rank 1 gloo:all_reduce of [[9]] (number "),
    ],
)
def test_hang_of_an_ordinary_script_is_named_by_its_collectives(tmp_path, servers, fault, part):
    for limit_s in WARM_LIMITS_S:
        plan = ordinary(tmp_path / f"{limit_s:g}", fault, limit_s, LauncherKind.FORKSERVER)
        failure = failed(plan, limit_s + 60, servers.launch)
        # A file that ranks write in step 5 does not tell where they were looked at: they go on until the signal.
        if part in failure.headline:
            break
    assert (failure.kind, failure.rank) == ("hang in collective", 1), failure.text
    assert part in failure.headline


# In CI, the cold launch that hangs above shows its stacks.
@pytest.mark.parametrize("launcher", [nightly(LauncherKind.TORCHRUN), pytest.param(LauncherKind.FORKSERVER, id="warm")])
def test_stacks_show_where_ranks_were_before_the_signal_that_ended_them(tmp_path, servers, launcher):
    plan = ordinary(tmp_path / "raises", "raises", START_S, launcher)
    failure = failed(plan, START_S, servers.launch)
    assert (failure.kind, failure.rank) == ("rank exception", 1), failure.text
    assert [frame.function for frame in read_evidence(plan)[0].frames] == ["spin", "<module>"]


def test_taken_port_and_variables_of_another_launch_change_nothing(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name in ("MASTER_PORT", "PET_RDZV_ENDPOINT", "PET_NPROC_PER_NODE", "RANK", "TORCHELASTIC_RUN_ID"):
            monkeypatch.setenv(name, f"127.0.0.1:{port}" if "ENDPOINT" in name else port)
        plan = make_plan(tmp_path, "none")
        outcome = launch(plan)
    assert launch_failure(plan, outcome) is None
    assert collect_result(plan, outcome).world_size == 2


INNER = """
import os, pathlib

def test_hang(workload):
    pathlib.Path("tested").write_text(str(os.getpid()))
    workload.run("faulty", kind="absent")
"""


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ("--aorta-launcher=forkserver",)),
        (signal.SIGKILL, ()),
        nightly(signal.SIGINT, ("--aorta-launcher=forkserver",)),
        (signal.SIGKILL, ("--aorta-launcher=forkserver", "-n1", "--max-worker-restart=0")),
    ],
    ids=["SIGINT", "SIGTERM, warm", "SIGKILL", "SIGINT, warm", "SIGKILL of a worker of xdist, warm"],
)
def test_ended_pytest_leaves_no_rank_and_no_lease(tmp_path, monkeypatch, number, options):
    monkeypatch.setenv(variables.LEASE_DIR, str(tmp_path / "leases"))
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naorta_workloads = {WORKLOADS}\n")
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--aorta-results={results}"]
    process = subprocess.Popen(
        [*command, "--aorta-gpus=0", *options],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    await_true(lambda: len(rank_pids(results)) == 2)
    assert len({holder.owner for holder in holders()}) == 1
    started = [*rank_pids(results), *(parent_of(pid) for pid in rank_pids(results))]
    os.kill(int((tmp_path / "tested").read_text()), number)
    process.communicate(timeout=START_S)
    assert process.returncode != 0
    await_true(lambda: ranks_left(results) == [] and not any(map(is_alive, started)), limit_s=60)
    # A process that ends shows no environment any more before its lease is free.
    await_true(lambda: holders() == [], limit_s=60)


PROGRAM = """
import os, sys
from pathlib import Path
{before}
import tests.distributed.test_faults as t
plan = t.make_plan(Path(sys.argv[1]), "none", {limit_s})
failure = t.launch_failure(plan, t.launch(plan))
print(failure and f"{{failure.kind}}: {{failure.text}}")
"""
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]
# Sets loopback up, and takes the single free port.
ONE_TAKEN_PORT = """
import socket, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("40000 40000")
taken = [socket.create_server(("", 40000)), socket.create_server(("::", 40000), family=socket.AF_INET6)]
"""


HOSTS = {
    "closed stdin": ([], "os.close(0)", START_S, "None"),
    "no network": (OWN_NETWORK, "", 15.0, "rendezvous: "),
    "no free port": (OWN_NETWORK, ONE_TAKEN_PORT, 15.0, "rendezvous: "),
}


@pytest.mark.extended
@each_of("namespace, before, limit_s, end", HOSTS)
def test_host_without_a_usable_port_is_a_failed_rendezvous(tmp_path, namespace, before, limit_s, end):
    if reason := refused_namespaces(namespace, ["unshare", "ip"], "ip link"):
        pytest.skip(reason)
    command = [*namespace, sys.executable, "-c", PROGRAM.format(before=before, limit_s=limit_s), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=START_S)
    assert ended.stdout.startswith(end), ended.stdout + ended.stderr
    assert mentioning(str(tmp_path / "run")) == []
