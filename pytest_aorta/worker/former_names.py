"""Former module names of the worker, importable for one release.

An A/B launch runs the workloads of an older commit with this version of the package. Those workloads may import a
public class from the module that defined the class at that commit.
"""

from __future__ import annotations

import sys

from pytest_aorta.worker.hashing import weights
from pytest_aorta.worker.overlap import spans
from pytest_aorta.worker.timing import delay, measure, timer

FORMER_NAMES = {
    "weight_hash": weights,
    "stream_spans": spans,
    "timer": timer,
    "delay": delay,
    "measuring": measure,
}


def keep_former_names(package: str) -> None:
    """Make each former name importable below ``package``."""
    for name, module in FORMER_NAMES.items():
        sys.modules.setdefault(f"{package}.{name}", module)
