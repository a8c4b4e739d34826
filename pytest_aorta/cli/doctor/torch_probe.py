"""The checks of ``aorta doctor`` that need the driver, or torch, which another process imports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_aorta.cli.doctor.host import NOTE, OK, PROBLEM, Finding
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.programs import run_program
from pytest_aorta.plan.device_kind import NVIDIA, Device

# An import of torch from a cold network disk can take minutes.
PROBE_S = 300.0
MIN_TORCH = (2, 11)
MAX_NVLINKS = 18
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
) -> list[Finding]:
    """Report the version and build of torch, its backends, and whether it finds the GPUs of the driver."""
    if isinstance(facts, str):
        return [Finding("torch", PROBLEM, f"can't be imported: {facts}", _INSTALL)]
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU"
    found = [_version(facts["torch"], build)]
    if "gloo" not in facts["backends"]:
        found.append(Finding("torch", PROBLEM, "it has no gloo, the backend of CPU ranks", _INSTALL))
    if not devices:
        return found
    vendor = devices[0].vendor
    library = "NCCL" if vendor == NVIDIA else "RCCL"
    if not (facts["cuda"] if vendor == NVIDIA else facts["hip"]):
        text = f"GPUs are there and torch is built for {build} only"
        return [*found, Finding("torch", PROBLEM, text, f"{_INSTALL}, or run with --aorta-device=cpu")]
    if facts["nccl"] is None:
        found.append(Finding("torch", PROBLEM, f"it has no {library}, the backend of GPU ranks", _INSTALL))
    else:
        found.append(Finding("torch", OK, f"{library} {facts['nccl']}"))
    return [*found, *_driver(facts, devices, driver_cuda)]


def _version(version: str, build: str) -> Finding:
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if number < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        return Finding("torch", PROBLEM, f"{version}, which is older than {least}", f"{_INSTALL}, {least} or newer")
    return Finding("torch", OK, f"{version}, built for {build}")


def _driver(facts: dict[str, Any], devices: Sequence[Device], driver_cuda: tuple[int, int] | None) -> list[Finding]:
    if facts["device_count"] == len(devices):
        driver = f"; the driver supports CUDA {driver_cuda[0]}.{driver_cuda[1]}" if driver_cuda else ""
        return [Finding("torch", OK, f"torch finds {facts['device_count']} of {len(devices)} GPUs{driver}")]
    text = f"torch finds {facts['device_count']} GPUs, the driver {len(devices)}"
    if driver_cuda and facts["cuda"] and int(facts["cuda"].split(".")[0]) > driver_cuda[0]:
        text += f": torch is built for CUDA {facts['cuda']}, the driver supports {driver_cuda[0]}.{driver_cuda[1]}"
        return [Finding("torch", PROBLEM, text, "update the driver, or install torch for the driver's CUDA")]
    remedy = "run `python -c 'import torch; torch.cuda.init()'`, and read the kernel log (dmesg)"
    return [Finding("torch", PROBLEM, text, remedy)]


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10


def link_findings(links: Mapping[str, int]) -> list[Finding]:
    """Report NVLinks; ``links`` has the number of active NVLinks of each GPU."""
    if len(links) < 2:
        return []
    counts = set(links.values())
    listed = ", ".join(f"{token}: {count}" for token, count in links.items())
    if counts == {0}:
        return [Finding("links", NOTE, "no NVLink between GPUs; collectives go over PCIe", "see nvidia-smi topo -m")]
    if len(counts) > 1:
        text = f"active NVLinks differ by GPU ({listed}); the fewest set the speed"
        return [Finding("links", NOTE, text, "see nvidia-smi nvlink --status for links that are down")]
    return [Finding("links", OK, f"{counts.pop()} active NVLinks on each GPU")]


def active_nvlinks(devices: Sequence[Device]) -> dict[str, int]:
    """Return token -> number of active NVLinks, for NVIDIA GPUs for which NVML reports NVLinks."""
    import pynvml

    found: dict[str, int] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return found
    try:
        for device in devices:
            if device.vendor == NVIDIA and not device.uuid.startswith("MIG-"):
                handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
                found[device.token] = sum(_is_up(handle, link) for link in range(MAX_NVLINKS))
    except pynvml.NVMLError:
        return found
    finally:
        pynvml.nvmlShutdown()
    return found


def _is_up(handle: Any, link: int) -> bool:
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError:  # no such link
        return False
