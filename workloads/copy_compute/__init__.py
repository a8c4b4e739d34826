"""Matrix products beside copies, to measure how much of a copy's time the device can hide."""

from .workload import CopyComputeWorkload as CopyComputeWorkload
