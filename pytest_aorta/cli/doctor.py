"""``aorta doctor``: looks for problems that would break a run, and lists leases."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError, SpecError
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import counted, emit, output_width, table, wrapped
from pytest_aorta.launch.leases import holders
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.world import MAX_CPU_RANKS_PER_CORE

MIB = 1 << 20
# The default size in containers, which a few NCCL channels fill.
SMALL_SHM_BYTES = 64 * MIB
# An import of torch from a cold network disk can take minutes.
PROBE_S = 300.0
_INSTALL = (
    "install torch as https://pytorch.org/get-started says for this machine and its driver; "
    "python -m torch.utils.collect_env and the kernel log (dmesg) say more"
)
# Torch, or what a sitecustomize imports, may print before and after.
_PROBE = "import torch; print('\\ntorch:', torch.__version__, torch.cuda.device_count(), flush=True)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action of the subcommand."""
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Problem:
    """A fact that would break a run, and its remedy."""

    text: str
    remedy: str


def run(_arguments: argparse.Namespace) -> int:
    """Print the problems, one line per GPU or other leased resource, and one line on what this machine can run."""
    devices: list[Device] = []
    problems: list[_Problem] = []
    try:
        devices = visible_devices()
    except AortaError as error:
        problems.append(_Problem(f"devices: {error}", "repair the driver or the variable that is named"))
    torch, problem = _torch(len(devices))
    problems += [problem] if problem else []
    free_bytes = 0
    with suppress(FileNotFoundError):
        room = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
        free_bytes = room.f_bavail * room.f_frsize
    problems += shm_problems(free_bytes, len(devices))
    width = output_width()
    for problem in problems:
        emit(wrapped(f"PROBLEM  {problem.text}", width) + wrapped(f"         -> {problem.remedy}", width))
    emit(_leases(devices))
    emit([f"{counted(len(problems), 'problem') if problems else 'no problem'}; {torch}{_devices(devices)}"])
    return ExitCode.PROBLEM if problems else ExitCode.OK


def _leases(devices: Sequence[Device]) -> list[str]:
    """Return a table of GPUs and of all resources that are leased; nothing without any."""
    listed = {device.uuid: (device.token, device.model) for device in devices}
    held = {holder.resource: f"held by {holder}" for holder in holders()}
    names = dict.fromkeys([*listed, *held])
    rows = [(name, *listed.get(name, ("-", "-")), held.get(name, "free")) for name in names]
    return table([("name", "token", "model", "state"), *rows], output_width()) if rows else []


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


def _torch(num_gpus: int) -> tuple[str, _Problem | None]:
    """Return torch's version for the last line, and a problem if torch can't be imported or misses GPUs."""
    try:
        status, output, complaint = run_program([sys.executable, "-c", _PROBE], os.environ, PROBE_S)
    except SpecError as error:
        return "", _Problem(f"torch can't be imported: {error}", _INSTALL)
    found = re.findall(r"^torch: (\S+) (\d+)$", output, re.MULTILINE)
    if status or not found:
        why = " ".join(complaint.strip().splitlines()[-1:]) or f"its process ended with {status}"
        return "", _Problem(f"torch can't be imported: {why}", _INSTALL)
    version, count = found[-1]
    text = f"torch {version} finds {count} GPUs, the driver {num_gpus}"
    return f"torch {version}; ", None if int(count) == num_gpus else _Problem(text, _INSTALL)
