"""``aorta doctor``: looks for problems that would break a run, on the host and in its torch, and lists leases."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError, SpecError
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import counted, emit, output_width, table, wrapped
from pytest_aorta.launch.leases import holders
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import BACKENDS, BUILDS, KINDS, Device
from pytest_aorta.plan.world import MAX_CPU_RANKS_PER_CORE

MIB = 1 << 20
# The default size in containers, which a few NCCL channels fill.
SMALL_SHM_BYTES = 64 * MIB
# An import of torch from a cold network disk can take minutes.
PROBE_S = 300.0
MIN_TORCH = (2, 11)
_INSTALL = "install torch as https://pytorch.org/get-started says for this machine"
_PROBE = """
import json, sys, torch, torch.distributed as dist
kinds, backends = json.loads(sys.argv[1])
facts = {
    "torch": str(torch.__version__), "problem": "", "device_count": 0,
    "builds": {name: version for name in kinds if (version := getattr(torch.version, name, None))},
    "backends": [name for name in backends if dist.is_available() and dist.is_backend_available(name)],
}
for name in facts["builds"]:
    module = getattr(torch, kinds[name])
    facts["device_count"] = module.device_count()
    try:
        module.init()
    except RuntimeError as error:
        facts["problem"] = str(error)
print("\\nfacts: " + json.dumps(facts), flush=True)
"""
_MARK = "facts: "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action of the subcommand."""
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Problem:
    """A fact that would break a run, and its remedy."""

    text: str
    remedy: str


def run(_arguments: argparse.Namespace) -> int:
    """Print the problems, one line per GPU or other leased resource, and one line on what this machine can run."""
    devices: list[Device] = []
    problems: list[Problem] = []
    try:
        devices = visible_devices()
    except AortaError as error:
        problems.append(Problem(f"devices: {error}", "repair the driver or the variable that is named"))
    facts = probe_torch()
    free_bytes = 0
    with suppress(FileNotFoundError):
        room = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
        free_bytes = room.f_bavail * room.f_frsize
    problems += [*torch_problems(facts, devices), *shm_problems(free_bytes, len(devices))]
    width = output_width()
    for problem in problems:
        emit(wrapped(f"PROBLEM  {problem.text}", width) + wrapped(f"         -> {problem.remedy}", width))
    emit(_leases(devices))
    torch = "" if isinstance(facts, str) else f"torch {facts['torch']}, built for {_build(facts)}; "
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


def _build(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.upper()} {version}" for name, version in facts["builds"].items()) or "CPU"


def shm_problems(free_bytes: int, num_gpus: int) -> Iterator[Problem]:
    """Report shared memory that is too small for NCCL, which exchanges data between processes of one host in it."""
    if num_gpus > 1 and free_bytes <= SMALL_SHM_BYTES:
        text = f"/dev/shm has {free_bytes / MIB:,.0f} MiB free, and NCCL needs more"  # noqa: S108
        yield Problem(text, "start the container with --shm-size=16g or --ipc=host")


def probe_torch(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | str:
    """Return facts about torch, or the reason why it can't be imported; another process imports it."""
    asked = json.dumps([{build: KINDS[vendor] for vendor, build in BUILDS.items()}, [*BACKENDS.values()]])
    try:
        status, output, complaint = run_program([sys.executable, "-c", _PROBE, asked], environ, PROBE_S)
    except SpecError as error:
        return str(error)
    # Torch, or what a sitecustomize imports, may print before and after, or end the process.
    found = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if status or not found:
        return " ".join(complaint.strip().splitlines()[-1:]) or f"its process ended with {status}"
    facts: dict[str, Any] = json.loads(found[-1])
    return facts


def torch_problems(facts: dict[str, Any] | str, devices: Sequence[Device]) -> Iterator[Problem]:
    """Report a version or build of torch, a missing backend or GPUs unseen by torch, with which a run would fail."""
    if isinstance(facts, str):
        yield Problem(f"torch can't be imported: {facts}", _INSTALL)
        return
    version = facts["torch"]
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        yield Problem(f"torch {version} is older than {least}", f"{_INSTALL}, {least} or newer")
    if "gloo" not in facts["backends"]:
        yield Problem("torch has no gloo, the backend of CPU ranks", _INSTALL)
    if not devices:
        return
    if BUILDS[devices[0].vendor] not in facts["builds"]:
        text = f"GPUs are there and torch is built for {_build(facts)} only"
        yield Problem(text, f"{_INSTALL}, or run with --aorta-gpus=0")
        return
    if (backend := BACKENDS[devices[0].kind]) not in facts["backends"]:
        yield Problem(f"torch has no {backend.upper()}, the backend of GPU ranks", _INSTALL)
    if facts["device_count"] != len(devices) or facts["problem"]:
        text = f"torch finds {facts['device_count']} GPUs, the driver {len(devices)}"
        remedy = "install torch for the driver's CUDA or update the driver, and read the kernel log (dmesg)"
        yield Problem(": ".join(filter(None, [text, facts["problem"]])), remedy)
