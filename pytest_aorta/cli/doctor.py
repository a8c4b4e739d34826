"""``aorta doctor``: looks for problems that would break a run, on the host and in its torch."""

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
from pytest_aorta.common.text import counted, emit, output_width, wrapped
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import CUDA_VARIABLE, NVIDIA, Device
from pytest_aorta.plan.world import MAX_CPU_RANKS_PER_CORE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print every check, also of what is well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the problems, or every finding, and one line on what this machine can run."""
    found = findings()
    problems = [finding for finding in found if finding.state == PROBLEM]
    emit(_lines(found if arguments.verbose else problems))
    torch = next((f"torch {one.text}; " for one in found if (one.topic, one.state) == ("torch", OK)), "")
    emit([f"{counted(len(problems), 'problem') if problems else 'no problem'}; {torch}{found[0].text}"])
    return ExitCode.PROBLEM if problems else ExitCode.OK


def findings() -> list[Finding]:
    """Return all findings, in the order in which they would affect a run."""
    found: list[Finding] = []
    devices: list[Device] = []
    try:
        devices = visible_devices()
        found += device_findings(devices)
    except AortaError as error:
        found.append(Finding("devices", PROBLEM, str(error), "repair the driver or the variable that is named"))
    found += torch_findings(probe_torch(), devices, newest_cuda())
    room = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    found += shm_findings(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, len(devices))
    return found


def _lines(found: list[Finding]) -> list[str]:
    width, topics = output_width(), max((len(finding.topic) for finding in found), default=0)
    lines = []
    for finding in found:
        mark = finding.state if finding.state == OK else finding.state.upper()
        lines += wrapped(f"{finding.topic.ljust(topics)}  {mark.ljust(len(PROBLEM))}  {finding.text}", width)
        if finding.remedy and finding.state != OK:
            lines += wrapped(f"{' ' * topics}  {' ' * len(PROBLEM)}  -> {finding.remedy}", width)
    return lines


OK, NOTE, PROBLEM = "ok", "note", "problem"
MIB = 1 << 20
# The default size in containers, which a few NCCL channels fill.
SMALL_SHM_BYTES = 64 * MIB
ROOMY_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``state`` is ok, note (a run works) or problem (a run would fail)."""

    topic: str
    state: str
    text: str
    remedy: str = ""


def device_findings(devices: Sequence[Device]) -> Iterator[Finding]:
    """Report the GPUs that a run can use."""
    if not devices:
        cores = os.cpu_count() or 1
        text = f"no GPU is visible; runs take CPU ranks, at most {MAX_CPU_RANKS_PER_CORE * cores} on {cores} cores"
        yield Finding("devices", NOTE, text, "if this machine has GPUs, check their driver")
        return
    models = sorted({device.model for device in devices})
    yield Finding("devices", OK, f"{counted(len(devices), 'GPU')}: {' + '.join(models)}")
    if len(models) > 1:
        remedy = f"choose GPUs of one model with {CUDA_VARIABLE}"
        yield Finding("devices", NOTE, "GPUs differ; the slowest sets every step's time", remedy)


def shm_findings(size_bytes: int, free_bytes: int, num_gpus: int) -> Iterator[Finding]:
    """Report shared memory, which NCCL and data loaders use between processes of one host."""
    text = f"/dev/shm: {free_bytes / MIB:,.0f} of {size_bytes / MIB:,.0f} MiB free"  # noqa: S108
    remedy = "start the container with --shm-size=16g or --ipc=host"
    if num_gpus > 1 and free_bytes <= SMALL_SHM_BYTES:
        yield Finding("shared memory", PROBLEM, f"{text}; NCCL runs out of it", remedy)
    elif free_bytes < ROOMY_SHM_BYTES:
        yield Finding("shared memory", NOTE, f"{text}; data loaders with workers need more", remedy)
    else:
        yield Finding("shared memory", OK, text)


# An import of torch from a cold network disk can take minutes.
PROBE_S = 300.0
MIN_TORCH = (2, 11)
_INSTALL = "install torch as https://pytorch.org/get-started says for this machine"
_PROBE = """
import json, torch, torch.distributed as dist
has_cuda = torch.cuda.is_available()
facts = {
    "torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip,
    "device_count": torch.cuda.device_count() if has_cuda else 0,
    "backends": [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)],
    "nccl": None,
}
if "nccl" in facts["backends"]:
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print("\\n" + json.dumps(facts))
"""


def probe_torch(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | str:
    """Return facts about torch, or the reason why it can't be imported; another process imports it."""
    try:
        status, output, complaint = run_program([sys.executable, "-c", _PROBE], environ, PROBE_S)
    except SpecError as error:
        return str(error)
    if status:
        return " ".join(complaint.strip().splitlines()[-1:]) or f"its process ended with {status}"
    facts: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return facts


def torch_findings(
    facts: dict[str, Any] | str, devices: Sequence[Device], driver_cuda: tuple[int, int] | None
) -> Iterator[Finding]:
    """Report the version and build of torch, its backends, and whether it finds the GPUs of the driver."""
    if isinstance(facts, str):
        yield Finding("torch", PROBLEM, f"can't be imported: {facts}", _INSTALL)
        return
    version, cuda = facts["torch"], facts["cuda"]
    build = f"CUDA {cuda}" if cuda else f"ROCm {facts['hip']}" if facts["hip"] else "CPU"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        yield Finding("torch", PROBLEM, f"{version}, which is older than {least}", f"{_INSTALL}, {least} or newer")
    else:
        yield Finding("torch", OK, f"{version}, built for {build}")
    if "gloo" not in facts["backends"]:
        yield Finding("torch", PROBLEM, "it has no gloo, the backend of CPU ranks", _INSTALL)
    if not devices:
        return
    is_nvidia = devices[0].vendor == NVIDIA
    library = "NCCL" if is_nvidia else "RCCL"
    if not (cuda if is_nvidia else facts["hip"]):
        text = f"GPUs are there and torch is built for {build} only"
        yield Finding("torch", PROBLEM, text, f"{_INSTALL}, or run with --aorta-gpus=0")
        return
    if facts["nccl"] is None:
        yield Finding("torch", PROBLEM, f"it has no {library}, the backend of GPU ranks", _INSTALL)
    else:
        yield Finding("torch", OK, f"{library} {facts['nccl']}")
    count, newest = facts["device_count"], ".".join(map(str, driver_cuda or ()))
    text = f"torch finds {count} GPUs, the driver {len(devices)}"
    if count == len(devices):
        driver = f"; the driver supports CUDA {newest}" if newest else ""
        yield Finding("torch", OK, f"torch finds {count} of {len(devices)} GPUs{driver}")
    elif driver_cuda and cuda and int(cuda.split(".")[0]) > driver_cuda[0]:
        text += f": torch is built for CUDA {cuda}, the driver supports {newest}"
        yield Finding("torch", PROBLEM, text, "update the driver, or install torch for the driver's CUDA")
    else:
        remedy = "run `python -c 'import torch; torch.cuda.init()'`, and read the kernel log (dmesg)"
        yield Finding("torch", PROBLEM, text, remedy)


def newest_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports; None without one."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            return version // 1000, version % 1000 // 10
        finally:
            pynvml.nvmlShutdown()
    return None
