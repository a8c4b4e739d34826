"""Training steps under DDP, with a communication hook that owns its streams."""

from __future__ import annotations

from .workload import DdpOverlapWorkload

__all__ = ["DdpOverlapWorkload"]
