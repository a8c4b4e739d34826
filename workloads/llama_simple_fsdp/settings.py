"""How the traced model is compiled: what the config says, checked for contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class CompileSettings:
    """Every field is a config key of the workload."""

    backend: str
    bucketing: str
    bucket_modules: tuple[str, ...]
    bucket_order: str
    reshard_after_forward: bool
    overlap_reorder: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompileSettings:
        """Pick the keys out of the config.

        Raises:
            ValueError: keys that contradict each other.
        """
        values = {field.name: config[field.name] for field in fields(cls)}
        settings = cls(**values | {"bucket_modules": tuple(values["bucket_modules"])})
        settings._check()
        return settings

    @property
    def has_graph_pass(self) -> bool:
        """Whether collectives of the traced graphs are moved or merged."""
        return self.bucketing != "none" or self.overlap_reorder

    def check_context_parallel(self, degree: int) -> None:
        """Raise ValueError for a schedule by estimated times where ranks have graphs of other shapes."""
        if degree > 1 and self.has_graph_pass and self.bucketing in ("none", "auto"):
            raise ValueError(
                f"context_parallel_degree is {degree}, bucketing is {self.bucketing!r} and overlap_reorder is "
                f"{self.overlap_reorder}: collectives are ordered by estimated times, and ranks that attend to more "
                f"of a sequence would order theirs otherwise; allowed are bucketing transformer_block and manual, and "
                f"none without overlap_reorder"
            )

    def check_pipeline_parallel(self, degree: int) -> None:
        """Raise ValueError for groups of the whole model's modules where ranks hold a stage."""
        if degree > 1 and self.bucketing == "manual":
            raise ValueError(
                f"pipeline_parallel_degree is {degree} and bucketing is 'manual': bucket_modules names modules of the "
                f"whole model, and each stage holds some of them; allowed are none, transformer_block and auto"
            )

    def _check(self) -> None:
        asked = {
            f"bucketing {self.bucketing}": self.bucketing != "none",
            "overlap_reorder": self.overlap_reorder,
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.backend == "eager" and (given := [name for name, is_asked in asked.items() if is_asked]):
            raise ValueError(f"backend is eager, which runs no graph passes, and these need one: {', '.join(given)}")
        if (self.bucketing == "manual") != bool(self.bucket_modules):
            raise ValueError(
                f"bucket_modules is {list(self.bucket_modules)} and bucketing is {self.bucketing!r}: "
                f"groups are given for manual bucketing, and only for it"
            )
        if self.bucketing == "auto" and (self.bucket_order != "graph" or not self.overlap_reorder):
            raise ValueError(
                f"bucketing is auto, which reorders and packs buckets in graph order, and bucket_order is "
                f"{self.bucket_order!r}, overlap_reorder is {self.overlap_reorder}"
            )
