"""Training steps under DDP, with a communication hook that owns its streams."""

from .workload import DdpOverlapWorkload as DdpOverlapWorkload
