"""``aorta doctor``: checks everything that a run needs; the exit code is 1 if a problem would break a run."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from pytest_aorta.cli.doctor import host as doctor
from pytest_aorta.cli.doctor import torch_probe as doctor_torch
from pytest_aorta.cli.doctor.host import OK, PROBLEM, Finding
from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.text import counted, emit, output_width, wrapped
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.world import CPU_WORLD_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON: a list with topic, state, text and remedy")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=Path("results"), help="folder of results (default: results)"
    )
    parser.add_argument(
        "--baselines",
        metavar="DIR",
        type=Path,
        default=Path("baselines"),
        help="folder of baselines (default: baselines)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    found = findings({"results": arguments.results, "baselines": arguments.baselines})
    problems = sum(finding.state == PROBLEM for finding in found)
    if arguments.json:
        emit(json.dumps([asdict(finding) for finding in found], indent=2).splitlines())
    else:
        emit(_lines(found))
        emit([f"{counted(problems, 'problem')} would break a run" if problems else "nothing here would break a run"])
    return ExitCode.PROBLEM if problems else ExitCode.OK


def findings(folders: dict[str, Path]) -> list[Finding]:
    """Return all findings, in the order in which they would affect a run."""
    found: list[Finding] = []
    devices: list[Device] = []
    try:
        devices = visible_devices()
        found += doctor.device_findings(devices)
    except AortaError as error:
        found.append(Finding("devices", PROBLEM, str(error), "repair the driver or the variable that is named"))
    everything = _all_gpus(devices)
    found += doctor.variable_findings(os.environ, everything[0].vendor if everything else "", len(everything))
    found += doctor_torch.torch_findings(doctor_torch.probe_torch(), devices, doctor_torch.driver_cuda())
    found += doctor_torch.link_findings(doctor_torch.active_nvlinks(devices))
    found += doctor.port_findings()
    room = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    found += doctor.shm_findings(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, len(devices))
    num_ranks = max(len(devices), CPU_WORLD_SIZE)
    found += doctor.limit_findings(doctor.read_limits(), num_ranks, doctor.has_infiniband())
    found += doctor.lease_findings()
    return found + doctor.folder_findings(folders)


def _all_gpus(devices: list[Device]) -> list[Device]:
    """Return all GPUs regardless of visibility variables, or the visible GPUs if that fails."""
    try:
        return visible_devices({})
    except AortaError:
        return devices


def _lines(found: list[Finding]) -> list[str]:
    width, topics = output_width(), max(len(finding.topic) for finding in found)
    lines = []
    for finding in found:
        mark = finding.state if finding.state == OK else finding.state.upper()
        lines += wrapped(f"{finding.topic.ljust(topics)}  {mark.ljust(len(PROBLEM))}  {finding.text}", width)
        if finding.remedy and finding.state != OK:
            lines += wrapped(f"{' ' * topics}  {' ' * len(PROBLEM)}  -> {finding.remedy}", width)
    return lines
