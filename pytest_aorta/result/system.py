"""Facts of the host, and of what is installed there, that can move times. No comparison of numbers depends on them."""

import functools
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from pytest_aorta.common.model import Fact

# The version of pytest-aorta: other than the facts of the host, it is a part of how a launch is measured.
OWN_VERSION = "pytest_aorta"
# The hash of names and versions of installed packages.
PACKAGES = "packages"
# Variables that tell the image of a container: NVIDIA's build, and Apptainer's file.
_IMAGE_VARIABLES = ("NVIDIA_BUILD_ID", "APPTAINER_CONTAINER")
# A file of Podman that tells the digest of the image.
_PODMAN = Path("/run/.containerenv")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_STATUS = Path("/proc/self/status")


@functools.cache
def system_facts() -> dict[str, Fact]:
    """Return what is known of the host, and of this interpreter's packages."""
    return {name: value for name, value in _facts() if value}


def _facts() -> Iterator[tuple[str, Fact]]:
    with suppress(metadata.PackageNotFoundError):  # it can be on the search path alone
        yield OWN_VERSION, metadata.version("pytest-aorta")
    yield "kernel", platform.release()
    yield "libc", " ".join(platform.libc_ver())
    yield "governor", _text(_GOVERNOR).strip()
    for name, key in (("cpus", "Cpus_allowed_list"), ("numa_nodes", "Mems_allowed_list")):
        yield name, "".join(re.findall(rf"^{key}:\s*(\S+)", _text(_STATUS), re.MULTILINE))
    images = [*re.findall(r'^imageid="(.*)"', _text(_PODMAN), re.MULTILINE), *map(os.environ.get, _IMAGE_VARIABLES)]
    # Results are shared, and a path tells more than the image.
    yield "image", Path(next(filter(None, images), "")).name
    installed = sorted(entry.name for path in map(Path, sys.path) for entry in path.glob("*.dist-info"))
    yield PACKAGES, sha256("\n".join(installed).encode()).hexdigest()[:12]


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
