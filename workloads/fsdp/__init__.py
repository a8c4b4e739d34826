"""FSDP's communication and compute pattern with explicit collectives whose every element is checked."""

from .workload import FsdpWorkload as FsdpWorkload
