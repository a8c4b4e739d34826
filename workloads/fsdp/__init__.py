"""FSDP's communication and compute pattern with explicit collectives whose every element is checked."""

from __future__ import annotations

from .workload import FsdpWorkload

__all__ = ["FsdpWorkload"]
