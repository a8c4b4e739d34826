"""The markers of a test as typed values."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_aorta.plan.world import WorldSpec
from pytest_aorta.verdict.metrics import Tolerance


@dataclass(frozen=True)
class TestSpec:
    """The values that a test's markers set.

    Attributes:
        tolerances: Metric -> the change that a marker allows.
        timeout_s: Time limit of one launch, in seconds; None for the limit of the options.
        measures_overlap: Whether the test measures overlap, which needs the host exclusively.
    """

    __test__ = False

    world: WorldSpec = field(default_factory=WorldSpec)
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    timeout_s: float | None = None
    measures_overlap: bool = False
