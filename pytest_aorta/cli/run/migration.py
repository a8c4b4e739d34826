"""Options of AORTA's ``aorta run`` and ``train.py`` that this command does not have, with their replacements."""

from __future__ import annotations

AORTA_OPTIONS = {
    "--results-dir": "--results DIR",
    "--extra-env": "--set environment.KEY=VALUE, or a variable of your shell, which the ranks inherit",
    "--mitigations": "--set environment.KEY=VALUE for each variable of the mitigation",
    "--mitigations-file": "--config FILE with the variables under the key environment",
    "--environment": "run the interpreter of that environment, or compare with it by pytest --aorta-ab=python:PATH",
    "--collect": "--profiler rocprofv3 for traces, and workload.compare(..., steps=N) in a test for numerics",
    "--override": "--set KEY=VALUE with a key of the workload, which `aorta workloads NAME` lists",
    "--enable-rocm-metrics": "nothing, since GPUs are always read during the measured steps",
}
