"""The facts of a rank's environment that its measurements and numerics depend on."""

import os
import platform
import sys

import torch

from pytest_aorta.common.model import Fact
from pytest_aorta.plan.workloads import CPU_KERNELS, cpu_field, is_allowed
from pytest_aorta.worker import weight_hash
from pytest_aorta.worker.accelerator import device_facts

# Tool ids of sys.monitoring, which exists from Python 3.12 on.
_TOOLS = range(6)


def python_tracer() -> str | None:
    """Return the name of this thread's Python tracer, such as coverage, cProfile or a debugger; None without a tracer.

    Python calls a tracer at each line or call, so the steps take longer.
    """
    for tracer in (sys.gettrace(), sys.getprofile()):
        if tracer is not None:
            named = tracer if hasattr(tracer, "__qualname__") else type(tracer)
            return f"{named.__module__}.{named.__qualname__}"
    monitoring = getattr(sys, "monitoring", None)
    names = (monitoring.get_tool(number) for number in _TOOLS) if monitoring else ()
    return next((str(name) for name in names if name), None)


def environment_facts(
    device: torch.device, *, bitwise_reproducible: bool | None = None, any_cpu: bool = False
) -> dict[str, Fact]:
    """Return versions, device model, numeric switches and environment variables of this rank, as flat JSON values.

    The environment variables are those that a config may set.

    Args:
        device: Device that the steps run on.
        bitwise_reproducible: Whether a second launch computes the same bits; None reports what is known: the same bits
            on CPU, and on CUDA under ``torch.use_deterministic_algorithms``, unless it only warns. Nothing is known of
            HIP.
        any_cpu: Whether CPU ranks compute the same bits on CPUs of every vendor if the launch pins their kernels.
            If not, or if no kernels are pinned, the facts of a CPU rank include the CPU's vendor. Pinned kernels of
            ATen, MKL and oneDNN compute the same bits, except square roots of whole tensors, as in unfused optimizers:
            MKL rounds these differently on Intel and AMD CPUs. The bits of compiled kernels depend on the CPU.
    """
    if bitwise_reproducible is None:
        bitwise_reproducible = _is_reproducible(device)
    facts: dict[str, Fact] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device.type,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "bitwise_reproducible": bitwise_reproducible,
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "weight_hash_version": weight_hash.VERSION,
    }
    if device.type == "cpu":
        pinned = [f"{name}={os.environ[name]}" for name in CPU_KERNELS if name in os.environ]
        facts["cpu_kernels"] = " ".join(pinned) or None
        if not (any_cpu and pinned):
            facts["cpu_vendor"] = cpu_field("vendor_id") or platform.machine()
    else:
        facts |= device_facts(device)
    # The config or the caller has set these variables; inductor itself sets the folder of its cache.
    given = (name for name in sorted(os.environ) if is_allowed(name) and name != "TORCHINDUCTOR_CACHE_DIR")
    return facts | {name: os.environ[name] for name in given}


def _is_reproducible(device: torch.device) -> bool:
    if device.type == "cuda":
        # In mode 2, an algorithm that is not deterministic is an error. On HIP nobody has compared launches.
        return torch.get_deterministic_debug_mode() == 2 and not torch.version.hip
    return device.type == "cpu"
