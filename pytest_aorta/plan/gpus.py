"""Discovery of visible GPUs without torch: by NVML, else amdsmi, else ``rocm-smi``."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.plan.world import AMD, CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE, Device

# Device file of the AMD driver; without it no tool of ROCm is called.
AMD_DRIVER = Path("/dev/kfd")
ROCM_SMI = "rocm-smi"
ROCM_SMI_S = 20.0
# Errors of pynvml if NVIDIA's library or driver is missing. Any other error of NVML is reported.
_NVML_NO_DRIVER = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")


def visible_devices(environ: Mapping[str, str] = os.environ, amd_driver: Path = AMD_DRIVER) -> list[Device]:
    """Return the visible GPUs, in the order of the visibility variables; empty without a driver.

    Raises:
        DevicesUnavailable: A driver does not answer, or a variable names a device that the driver does not list.
    """
    devices = _nvidia_devices(environ)
    if devices is None:
        devices = _amd_devices(environ, amd_gpus() if amd_driver.exists() else [])
    return devices


def visible_tokens(variable: str | None, count: int) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA accepts.

    CUDA ignores everything from the first invalid entry on, hides all devices if an entry is repeated, and shows all
    ``count`` devices if the variable is not set.
    """
    if variable is None:
        return [str(number) for number in range(count)]
    tokens: list[str] = []
    for token in (part.strip() for part in variable.split(",")):
        is_number = token.isascii() and token.isdigit()
        if token in tokens:
            return []
        if not (int(token) < count if is_number else token.startswith(("GPU-", "MIG-"))):
            break
        tokens.append(token)
    return tokens


def _nvidia_devices(environ: Mapping[str, str]) -> list[Device] | None:
    """Return the GPUs that NVML reports; None without an NVIDIA driver."""
    import pynvml  # imported only when devices are needed

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) in [getattr(pynvml, name) for name in _NVML_NO_DRIVER]:
            return None
        raise _no_answer("NVML", error) from None
    try:
        value = environ.get(CUDA_VARIABLE)
        tokens = visible_tokens(value, pynvml.nvmlDeviceGetCount())
        return _distinct(CUDA_VARIABLE, value, [_nvidia_device(token) for token in tokens])
    finally:
        pynvml.nvmlShutdown()


def _nvidia_device(token: str) -> Device:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(token)) if token.isdigit() else _nvidia_handle(token)
        return Device(token, str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle)))
    except pynvml.NVMLError as error:
        raise _unknown(CUDA_VARIABLE, token, f": {error}") from None


def _nvidia_handle(name: str) -> Any:
    """Return the handle for a UUID or, as CUDA allows, an unambiguous prefix of one."""
    import pynvml

    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        named = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in _nvidia_handles(name.startswith("MIG-"))}
        found = _only_match(CUDA_VARIABLE, name, [whole for whole in named if whole.startswith(name)])
        if found is None:
            raise
        return named[found]


def _nvidia_handles(mig: bool) -> Iterator[Any]:
    """Yield the handle of every GPU, or of every MIG device."""
    import pynvml

    for number in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
        if not mig:
            yield gpu
            continue
        with suppress(pynvml.NVMLError):  # a GPU without MIG
            for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                with suppress(pynvml.NVMLError):  # an empty slot
                    yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)


def _amd_devices(environ: Mapping[str, str], gpus: list[Device]) -> list[Device]:
    """Apply ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES or, without it, CUDA_VISIBLE_DEVICES."""
    variable = HIP_VARIABLE if HIP_VARIABLE in environ else CUDA_VARIABLE
    left = _amd_select(ROCR_VARIABLE, environ.get(ROCR_VARIABLE), gpus)
    return _amd_select(variable, environ.get(variable), left)


def _amd_select(variable: str, value: str | None, gpus: list[Device]) -> list[Device]:
    """Return the selected GPUs, renumbered from 0 as HIP numbers them."""
    if not gpus:
        return []
    # HIP ignores an empty value, but torch hides all devices, as the user intended.
    numbers = [_amd_number(variable, token, gpus) for token in visible_tokens(value, len(gpus))]
    return _distinct(variable, value, [replace(gpus[number], token=str(number)) for number in numbers])


def _amd_number(variable: str, token: str, gpus: list[Device]) -> int:
    if token.isdigit():
        return int(token)
    # ROCr accepts a prefix of a name, in upper or lower case.
    names = [gpu.uuid.lower() for gpu in gpus]
    found = _only_match(variable, token, [name for name in names if name.startswith(token.lower())])
    if found is None:
        raise _unknown(variable, token, "")
    return names.index(found)


def amd_gpus() -> list[Device]:
    """Return all AMD GPUs, regardless of variables; empty if neither amdsmi nor rocm-smi is installed."""
    gpus = _amdsmi_gpus()
    if gpus is None:
        gpus = _rocm_smi_gpus()
    gpus = gpus or []
    # Partitions of one GPU share its serial number.
    serials = Counter(gpu.uuid for gpu in gpus)
    return [replace(gpu, uuid=f"{gpu.uuid}/{gpu.token}") if serials[gpu.uuid] > 1 else gpu for gpu in gpus]


def _amdsmi_gpus() -> list[Device] | None:
    """Return the GPUs that amdsmi reports; None if amdsmi or its library is not installed."""
    try:
        with redirect_stdout(io.StringIO()):  # amdsmi prints which library is missing
            amdsmi: Any = importlib.import_module("amdsmi")
    except Exception:  # noqa: BLE001 - a KeyError if the library is missing
        return None
    try:
        amdsmi.amdsmi_init()
        try:
            infos = [amdsmi.amdsmi_get_gpu_asic_info(handle) for handle in amdsmi.amdsmi_get_processor_handles()]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException as error:
        raise _no_answer("amdsmi", error) from None
    return [_amd_gpu(number, info["market_name"], info["asic_serial"]) for number, info in enumerate(infos)]


def _rocm_smi_gpus() -> list[Device] | None:
    """Return the GPUs that the command rocm-smi reports; None if the command is not installed."""
    command = [ROCM_SMI, "--showproductname", "--showuniqueid", "--json"]
    # A file instead of a pipe: a process that rocm-smi leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.DEVNULL, timeout=ROCM_SMI_S, check=True)
            output.seek(0)
            cards = _rocm_smi_cards(output.read().decode("utf-8", "replace"))
        except FileNotFoundError:
            return None
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise _no_answer(" ".join(command), error) from None
    return [_amd_gpu(number, _model(card), card.get("unique id", "")) for number, card in enumerate(cards)]


def _rocm_smi_cards(text: str) -> list[dict[str, str]]:
    """Return one dictionary per card, in order; keys are in lower case, since versions differ in case."""
    # Warnings may precede the JSON document.
    document = json.loads(text[max(0, text.find("{")) :])
    cards = {int(name[4:]): card for name, card in document.items() if name.startswith("card")}
    return [{key.lower(): str(value) for key, value in card.items()} for _, card in sorted(cards.items())]


def _model(card: dict[str, str]) -> str:
    names = [card.get(key, "N/A") for key in ("card series", "card model")]
    return next((name for name in names if name != "N/A"), "AMD GPU")


def _amd_gpu(number: int, model: str, serial: str) -> Device:
    """Return a device named as in ROCR_VISIBLE_DEVICES or, without a serial number, by its number."""
    try:
        unique = int(serial, 16)
    except ValueError:
        unique = 0
    return Device(str(number), model, f"GPU-{unique:016x}" if unique else f"AMD-{number}", AMD)


def _only_match(variable: str, token: str, matches: list[str]) -> str | None:
    if len(matches) > 1:
        raise DevicesUnavailable(
            f"{variable} names {token!r}, which is the beginning of {len(matches)} devices' names, {matches}; "
            f"give whole names"
        )
    return matches[0] if matches else None


def _distinct(variable: str, value: str | None, devices: list[Device]) -> list[Device]:
    """Return ``devices``; raise an error if two names mean the same device, which two tests could lease at once."""
    for uuid, count in Counter(device.uuid for device in devices).items():
        if count > 1:
            raise DevicesUnavailable(f"{variable}={value!r} names {uuid} {count} times; give it once")
    return devices


def _unknown(variable: str, token: str, why: str) -> DevicesUnavailable:
    return DevicesUnavailable(
        f"{variable} names {token!r}, which the driver does not know{why}; give numbers or whole names"
    )


def _no_answer(source: str, error: Exception) -> DevicesUnavailable:
    return DevicesUnavailable(f"{source} can't list the GPUs: {error}; repair the driver, or give --aorta-gpus=0")
