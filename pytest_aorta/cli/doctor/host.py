"""Checks of this machine: one function per topic turns plain facts into findings with a remedy."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.text import counted
from pytest_aorta.launch.leases import bad_marks, holders
from pytest_aorta.plan.accelerators import visible_tokens
from pytest_aorta.plan.device_kind import (
    AMD,
    CUDA_VARIABLE,
    HIP_VARIABLE,
    NVIDIA,
    ROCR_VARIABLE,
    VISIBLE_VARIABLES,
    Device,
)
from pytest_aorta.plan.world import MAX_CPU_RANKS_PER_CORE

OK, NOTE, PROBLEM = "ok", "note", "problem"
MIB, GIB = 1 << 20, 1 << 30
# The default size in containers, which a few NCCL channels fill.
SMALL_SHM_BYTES = 64 * MIB
ROOMY_SHM_BYTES = GIB
MIN_FREE_DISK_BYTES = GIB
# Sockets, logs and shared memory of one rank, at most.
FILES_PER_RANK = 128
MIN_PROCESSES = 512
_TRANSPORT_PREFIXES = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``state`` is ok, note (a run works) or problem (a run would fail)."""

    topic: str
    state: str
    text: str
    remedy: str = ""


def device_findings(devices: Sequence[Device]) -> list[Finding]:
    """Report the GPUs that a run can use."""
    cores = os.cpu_count() or 1
    if not devices:
        text = f"no GPU is visible; runs take CPU ranks, at most {MAX_CPU_RANKS_PER_CORE * cores} on {cores} cores"
        return [Finding("devices", NOTE, text, "none, unless this machine has GPUs: then check their driver")]
    models = sorted({device.model for device in devices})
    found = [Finding("devices", OK, f"{counted(len(devices), 'GPU')}: {' + '.join(models)}")]
    if len(models) > 1:
        remedy = f"choose GPUs of one model with {CUDA_VARIABLE}"
        found.append(Finding("devices", NOTE, "GPUs differ; the slowest sets every step's time", remedy))
    return found


def variable_findings(environ: Mapping[str, str], vendor: str, count: int) -> list[Finding]:
    """Report variables that hide devices; ``count`` and ``vendor`` describe all GPUs, before variables are applied."""
    found = []
    given = {name: environ[name] for name in VISIBLE_VARIABLES if name in environ}
    for name, value in given.items():
        wanted = [part.strip() for part in value.split(",") if part.strip()]
        read = visible_tokens(value, count)
        if count and len(read) < len(wanted):
            text = f"{name}={value!r} names {len(wanted)} and gives {len(read)} of {counted(count, 'GPU')}"
            remedy = "remove invalid and repeated entries: entries after them are ignored"
            found.append(Finding("variables", PROBLEM, text, remedy))
        else:
            found.append(Finding("variables", OK, f"{name}={value!r}"))
    if vendor == AMD and HIP_VARIABLE in given and given.get(CUDA_VARIABLE, given[HIP_VARIABLE]) != given[HIP_VARIABLE]:
        text = f"{HIP_VARIABLE} and {CUDA_VARIABLE} differ; HIP goes by the former"
        found.append(Finding("variables", PROBLEM, text, f"unset {CUDA_VARIABLE}"))
    if vendor == NVIDIA and (others := sorted({HIP_VARIABLE, ROCR_VARIABLE} & set(given))):
        found.append(Finding("variables", NOTE, f"{' and '.join(others)} mean nothing to these GPUs", "unset them"))
    if transport := sorted(name for name in environ if name.startswith(_TRANSPORT_PREFIXES)):
        values = ", ".join(f"{name}={environ[name]}" for name in transport)
        found.append(
            Finding("variables", NOTE, f"variables configure collectives: {values}", "check that they are intended")
        )
    return found


def limit_findings(limits: Mapping[str, int], num_ranks: int, has_infiniband: bool) -> list[Finding]:
    """Report soft limits of this process, which ranks inherit; ``resource.RLIM_INFINITY`` means no limit."""
    found = []
    needed = {"nofile": FILES_PER_RANK * (num_ranks + 1), "nproc": MIN_PROCESSES}
    for name, least in needed.items():
        is_enough = limits[name] == resource.RLIM_INFINITY or limits[name] >= least
        text = f"{name}: {_limit(limits[name])}" + ("" if is_enough else f", a run takes up to {least}")
        remedy = (
            "" if is_enough else f"ulimit -{'n' if name == 'nofile' else 'u'} {least}, or LimitNOFILE of the service"
        )
        found.append(Finding("ulimits", OK if is_enough else PROBLEM, text, remedy))
    memlock = limits["memlock"]
    is_short = has_infiniband and memlock != resource.RLIM_INFINITY
    text = f"memlock: {_limit(memlock)}" + (", and there is InfiniBand, which locks memory" if is_short else "")
    remedy = "ulimit -l unlimited (in a container: --ulimit memlock=-1)" if is_short else ""
    found.append(Finding("ulimits", PROBLEM if is_short else OK, text, remedy))
    return found


def shm_findings(size_bytes: int, free_bytes: int, num_gpus: int) -> list[Finding]:
    """Report shared memory, which NCCL and data loaders use between processes of one host."""
    text = f"/dev/shm: {free_bytes / MIB:,.0f} of {size_bytes / MIB:,.0f} MiB free"  # noqa: S108
    remedy = "start the container with --shm-size=16g or --ipc=host"
    if num_gpus > 1 and free_bytes <= SMALL_SHM_BYTES:
        return [Finding("shared memory", PROBLEM, f"{text}; NCCL runs out of it", remedy)]
    if free_bytes < ROOMY_SHM_BYTES:
        return [Finding("shared memory", NOTE, f"{text}; data loaders with workers need more", remedy)]
    return [Finding("shared memory", OK, text)]


def port_findings() -> list[Finding]:
    """Report what rendezvous needs: a free port on the loopback interface, and a host name that resolves."""
    found = []
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
        found.append(Finding("ports", OK, "the kernel gives free ports on the loopback"))
    except OSError as error:
        text = f"no port can be had on the loopback: {error.strerror or error}"
        remedy = "ip link set lo up; widen net.ipv4.ip_local_port_range; see what holds ports with ss -tln"
        found.append(Finding("ports", PROBLEM, text, remedy))
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        remedy = f"put it into /etc/hosts, or export GLOO_SOCKET_IFNAME=lo on one host (host name {name!r})"
        found.append(Finding("ports", NOTE, f"the host name leads nowhere ({error.strerror}); gloo may ask", remedy))
    return found


def lease_findings() -> list[Finding]:
    """Report leases of devices, and devices that are marked bad."""
    try:
        held, bad = holders(), bad_marks()
    except AortaError as error:
        return [Finding("leases", PROBLEM, str(error), "name another folder, or have its owner remove it")]
    found = [
        Finding(
            "leases", PROBLEM, f"{name} is given to nobody: {why}", f"aorta devices clear-bad {name}, once it works"
        )
        for name, why in sorted(bad.items())
    ]
    for claim in held:
        who = f"{counted(len(claim.resources), 'resource')} held by {claim.owner} ({claim.process})"
        if claim.is_dead:
            text = f"{who}, which is dead: a process it has started lives"
            found.append(Finding("leases", NOTE, text, "end that process: ps -eo pid,ppid,cmd shows ranks"))
        else:
            found.append(Finding("leases", NOTE, f"{who}; a run waits for it", "none; see aorta devices list"))
    return found or [Finding("leases", OK, "nothing is leased, nothing is marked bad")]


def folder_findings(folders: Mapping[str, Path]) -> list[Finding]:
    """Report whether results and baselines can be written and have free space."""
    found = []
    for what, folder in folders.items():
        nearest = folder.absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            found.append(Finding("folders", PROBLEM, f"{what}: {folder} can't be written", f"chmod u+wx {nearest}"))
            continue
        free = shutil.disk_usage(nearest).free
        is_short = free < MIN_FREE_DISK_BYTES
        text, remedy = f"{what}: {folder}, {free / GIB:,.1f} GiB free", "make room" if is_short else ""
        found.append(Finding("folders", NOTE if is_short else OK, text, remedy))
    return found


def read_limits() -> dict[str, int]:
    """Return the soft limits of this process."""
    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(number)[0] for name, number in numbers.items()}


def has_infiniband() -> bool:
    """Return whether the kernel lists an InfiniBand device."""
    with suppress(OSError):
        return any(Path("/sys/class/infiniband").iterdir())
    return False


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
