"""``aorta doctor``: looks for problems that would break a run, lists leases, and can time the machine (``--check``)."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import add_ranks, add_shared, given_options, launching, opened
from pytest_aorta.common.errors import AortaError, SpecError
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import counted, emit, table
from pytest_aorta.launch.leases import holders
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import ByDevice, Device
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.workloads import find_workload
from pytest_aorta.plan.world import ALL_DEVICES, MAX_CPU_RANKS_PER_CORE, WorldSpec
from pytest_aorta.session.history import keep_history, speed_checks, speed_folder
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side, TestRecord
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.attribution import SPEED_CASE, SPEED_METRICS, speed_changes
from pytest_aorta.verdict.metrics import format_value

MIB = 1 << 20
# The workload that the speed check launches, how often, its config, and how many earlier launches it is compared with.
_CHECKED, _LAUNCHES, _EARLIER = "copy_compute", 3, 9
_SIZES = ByDevice[dict[str, Any]](
    {"matrix_size": 8192, "dtype": "bfloat16", "copy_mb": 256, "all_reduce_mb": 256, "steps": 50, "profile_steps": 0},
    cpu={"matrix_size": 256, "copy_mb": 8, "all_reduce_mb": 4, "profile_steps": 0},
)
# The default size in containers, which a few NCCL channels fill.
SMALL_SHM_BYTES = 64 * MIB
# An import of torch from a cold network disk can take minutes.
PROBE_S = 300.0
_INSTALL = (
    "install torch as https://pytorch.org/get-started says for this machine and its driver; "
    "the kernel log (dmesg) says more"
)
# Torch, or what a sitecustomize imports, may print before.
_PROBE = """
import torch
print("\\ntorch:", torch.__version__, torch.cuda.device_count(), flush=True)
from torch.utils.collect_env import get_pretty_env_info
print(get_pretty_env_info())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options and the action of the subcommand."""
    check = "time matrix products, copies and an all-reduce on all devices, and compare them with earlier checks"
    parser.add_argument("--check", action="store_true", help=check)
    folder = (
        "folder of a history that has the checks (pytest's --aorta-history); by default, this host's own in the cache"
    )
    parser.add_argument("--history", metavar="DIR", type=Path, help=folder)
    add_ranks(parser)
    add_shared(parser, ("gpus", "timeout", "launcher"))


@dataclass(frozen=True)
class _Problem:
    """A fact that would break a run, and its remedy."""

    text: str
    remedy: str


def run(arguments: argparse.Namespace) -> int:
    """Print problems, leases, and one line on what this machine can run, then what torch tells of it."""
    devices: list[Device] = []
    problems: list[_Problem] = []
    try:
        devices = visible_devices()
    except AortaError as error:
        problems.append(_Problem(f"devices: {error}", "repair the driver or the variable that is named"))
    torch, facts, problem = _torch(len(devices))
    problems += [problem] if problem else []
    free_bytes = 0
    with suppress(FileNotFoundError):
        room = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
        free_bytes = room.f_bavail * room.f_frsize
    problems += shm_problems(free_bytes, len(devices))
    if arguments.check and not problems:
        problems += _check(arguments)
    for problem in problems:
        emit([f"PROBLEM  {problem.text}", f"         -> {problem.remedy}"])
    emit(_leases(devices))
    emit([f"{counted(len(problems), 'problem') if problems else 'no problem'}; {torch}{_devices(devices)}"])
    emit(facts)
    return ExitCode.PROBLEM if problems else ExitCode.OK


def _check(arguments: argparse.Namespace) -> list[_Problem]:
    """Time the machine, print the times of the slowest rank, keep them, and report what moved since earlier checks."""
    folder = arguments.history or speed_folder()
    options = given_options(arguments, history=folder, launcher=LauncherKind.FORKSERVER)
    spec, world = find_workload(_CHECKED, ()), WorldSpec(arguments.nproc or ALL_DEVICES)
    with (
        tempfile.TemporaryDirectory(prefix="aorta-check-") as runs,
        opened(options) as session,
        launching(session, world, Path(runs), timed=True) as launcher,
    ):
        config = _SIZES[launcher.world.device]
        results = [DistributedWorld(launcher).run(spec.name, **config) for _ in range(_LAUNCHES)]
    by_rank = [{name: one.rank_metrics[name] for name in SPEED_METRICS if name in one.rank_metrics} for one in results]
    # The slowest rank counts, which a mean would hide.
    launches = [
        one.facts.replace(metrics=one.facts.metrics | {name: max(times) for name, times in times_ms.items()})
        for one, times_ms in zip(results, by_rank, strict=True)
    ]
    compared = tuple(ComparedLaunch(Side.CANDIDATE, facts) for facts in launches)
    record = TestRecord(
        SPEED_CASE, comparisons=(Comparison(SPEED_CASE, platform=results[0].platform, launches=compared),)
    )
    known = speed_checks(folder, results[0].platform)
    rows: list[tuple[str, ...]] = [("speed check", "slowest rank", "time", "before")]
    for name, what in SPEED_METRICS.items():
        if name in by_rank[0]:
            slowest = by_rank[0][name].index(max(by_rank[0][name]))
            times = (median(one.metrics[name] for one in side) if side else None for side in (launches, known))
            rows.append((what, str(slowest), *(format_value(time, "ms") for time in times)))
    emit(table(rows))
    emit(keep_history([record], [], options))
    moved = "; ".join(speed_changes(known[-_EARLIER:], launches)) if known else ""
    return [_Problem(moved, "look for other work, clocks, heat and a power limit")] if moved else []


def _leases(devices: Sequence[Device]) -> list[str]:
    """Return a table of GPUs and of all resources that are leased; nothing without any."""
    listed = {device.uuid: (device.token, device.model) for device in devices}
    held = {holder.resource: f"held by {holder}" for holder in holders()}
    names = dict.fromkeys([*listed, *held])
    rows = [(name, *listed.get(name, ("-", "-")), held.get(name, "free")) for name in names]
    return table([("name", "token", "model", "state"), *rows]) if rows else []


def _devices(devices: Sequence[Device]) -> str:
    if devices:
        models = " + ".join(sorted({device.model for device in devices}))
        return f"{counted(len(devices), 'GPU')}: {models}"
    cores = os.cpu_count() or 1
    return f"no GPU is visible; runs take CPU ranks, at most {MAX_CPU_RANKS_PER_CORE * cores} on {cores} cores"


def shm_problems(free_bytes: int, num_gpus: int) -> Iterator[_Problem]:
    """Report shared memory that is too small for NCCL, which exchanges data between processes of one host in it."""
    if num_gpus > 1 and free_bytes <= SMALL_SHM_BYTES:
        text = f"/dev/shm has {free_bytes / MIB:,.0f} MiB free, and NCCL needs more"  # noqa: S108
        yield _Problem(text, "start the container with --shm-size=16g or --ipc=host")


def _torch(num_gpus: int) -> tuple[str, list[str], _Problem | None]:
    """Return torch's version for the last line, its facts, and a problem if it can't be imported or misses GPUs."""
    try:
        status, output, complaint = run_program([sys.executable, "-c", _PROBE], os.environ, PROBE_S)
    except SpecError as error:
        return "", [], _Problem(f"torch can't be imported: {error}", _INSTALL)
    if (found := re.search(r"^torch: (\S+) (\d+)$", output, re.MULTILINE)) is None:
        why = " ".join(complaint.strip().splitlines()[-1:]) or f"its process ended with {status}"
        return "", [], _Problem(f"torch can't be imported: {why}", _INSTALL)
    version, count = found.groups()
    text = f"torch {version} finds {count} GPUs, the driver {num_gpus}"
    problem = None if int(count) == num_gpus else _Problem(text, _INSTALL)
    return f"torch {version}; ", output[found.end() :].strip().splitlines(), problem
