"""The config of ``fsdp`` as typed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..common.rules import Rule, check_rules, checkpoint_rules
from ..common.settings import read_settings

GATHER_KINDS = ("stale_gather", "zeroed_gather", "partial_gather", "permuted_gather", "swapped_shards")
DATA_KINDS = (*GATHER_KINDS, "stale_h2d", "dropped_gradient", "stale_gradient")


@dataclass(frozen=True)
class FaultSpec:
    """The block ``fault`` of a config; ``iteration`` counts checked iterations from 0, None is every rank or layer."""

    kind: str = "none"
    iteration: int = 0
    layer: int | None = 0
    phase: str = "forward"
    rank: int | None = None
    source_rank: int = 0
    delay_ms: float = 0.0
    every: int = 1

    def check(self, *, verify: int, layers: int, world_size: int, optimizer: str) -> None:
        """Raise ValueError if the fault could not happen in this run."""
        if self.kind in DATA_KINDS:
            self._check_range("iteration", self.iteration, verify, "checked iterations (config key 'verify')")
        if self.layer is None and self.kind != "in_line":
            raise ValueError(f"fault {self.kind!r} has layer null, which only 'in_line' can have")
        self._check_range("layer", self.layer or 0, layers, "layers")
        for name, rank in (("rank", self.rank), ("source_rank", self.source_rank)):
            self._check_range(name, rank or 0, world_size, "ranks")
        if self.kind == "weight" and optimizer == "none":
            raise ValueError("fault 'weight' needs weights, and optimizer 'none' has none: set optimizer to 'sgd'")

    def _check_range(self, name: str, value: int, count: int, of_what: str) -> None:
        if not 0 <= value < count:
            allowed = f"0..{count - 1}" if count else "none"
            raise ValueError(f"fault {self.kind!r} has {name} {value}; of {count} {of_what}, allowed is {allowed}")


@dataclass(frozen=True)
class Settings:
    """The keys of ``fsdp``, and the rank and world size of this rank."""

    steps: int
    warmup: int
    verify: int
    profile_steps: int
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
