"""The checked config as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .faults import FaultSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """One value a key of ``default.yaml``, and this rank's place in the world."""

    steps: int
    warmup: int
    verify: int
    profile_steps: int
    span_every: int
    layers: int
    gemm_size: int
    fsdp_shard_size: int
    dtype: torch.dtype
    h2d_tensor_size: int
    h2d_prefetch: bool
    comm_stream: bool
    pin_memory: bool
    optimizer: str
    seed: int
    fault: FaultSpec
    rank: int
    world_size: int

    @classmethod
    def read(cls, config: Mapping[str, Any], rank: int, world_size: int) -> Settings:
        """Convert ``config`` and check what a schema of single keys cannot.

        Raises:
            ValueError: the fault or the optimizer does not fit the other keys.
        """
        values = dict(config) | {"dtype": DTYPES[config["dtype"]], "fault": FaultSpec(**config["fault"])}
        settings = cls(**values, rank=rank, world_size=world_size)
        settings.fault.check(
            verify=settings.verify,
            layers=settings.layers,
            world_size=world_size,
            optimizer=settings.optimizer,
        )
        settings._check_weights_stay_exact()
        return settings

    @property
    def iterations(self) -> int:
        """Steps of all phases."""
        return self.warmup + self.verify + self.steps

    @property
    def gradient_size(self) -> int:
        """Elements of one layer over all ranks."""
        return self.world_size * self.fsdp_shard_size

    def _check_weights_stay_exact(self) -> None:
        # Each step subtracts a code of at most 251 from a weight that starts as one; float32 counts to 2**24.
        allowed = 2**24 // 251 - 1
        if self.optimizer == "sgd" and self.iterations > allowed:
            raise ValueError(
                f"optimizer 'sgd' was given {self.iterations} steps (warmup + verify + steps); "
                f"its float32 weights are exact for at most {allowed}"
            )
