"""The config of ``fsdp`` as typed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..common.rules import Rule, check_rules, checkpoint_rules
from ..common.settings import read_settings
from .faults import FaultSpec


@dataclass(frozen=True)
class Settings:
    """The keys of ``fsdp``, and the rank and world size of this rank."""

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
    save_checkpoint: str | None
    async_save: bool
    load_checkpoint: str | None
    hash_every: int
    seed: int
    fault: FaultSpec
    rank: int
    world_size: int

    @classmethod
    def read(cls, config: Mapping[str, Any], rank: int, world_size: int) -> Settings:
        """Convert ``config`` and check the rules that a schema of single keys cannot express.

        Raises:
            ValueError: A fault, the optimizer or a checkpoint contradicts other keys.
        """
        settings = read_settings(cls, {**config, "rank": rank, "world_size": world_size})
        check_rules(settings.rules(), config)
        settings.fault.check(
            verify=settings.verify, layers=settings.layers, world_size=world_size, optimizer=settings.optimizer
        )
        settings.check_steps(0)
        return settings

    def rules(self) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch refuses."""
        yield from checkpoint_rules(self.save_checkpoint, self.load_checkpoint)
        is_stateless = (self.save_checkpoint or self.load_checkpoint) and self.optimizer == "none"
        yield "save_checkpoint load_checkpoint optimizer", is_stateless, "there are no weights; use sgd"
        reason = "checked steps train too, ahead of the measured ones; use verify 0"
        yield "load_checkpoint verify", self.load_checkpoint and self.verify, reason

    @property
    def iterations(self) -> int:
        """Return the number of steps of all phases."""
        return self.warmup + self.verify + self.steps

    def check_steps(self, trained: int) -> None:
        """Raise ValueError if weights that ``trained`` steps made would not stay exact."""
        # Each step subtracts a code of at most 251 from a weight that starts as a code; float32 counts to 2**24.
        allowed = 2**24 // 251 - 1
        if self.optimizer == "sgd" and trained + self.iterations > allowed:
            raise ValueError(
                f"optimizer 'sgd' was given {self.iterations} steps (warmup + verify + steps) after {trained} of a "
                f"loaded checkpoint; its float32 weights are exact for at most {allowed}"
            )
