"""A test's markers, read."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_aorta.plan.world import WorldSpec
from pytest_aorta.verdict.metrics import Tolerance


@dataclass(frozen=True)
class TestSpec:
    """Everything a test's markers say."""

    __test__ = False

    world: WorldSpec = field(default_factory=WorldSpec)
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    timeout_s: float | None = None
