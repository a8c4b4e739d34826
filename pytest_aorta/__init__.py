"""Performance, overlap and numerics tests for FSDP training, as a pytest plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_aorta.common.errors import (
    AortaError,
    BaselineError,
    ComparisonFailed,
    DevicesUnavailable,
    LaunchError,
    LeaseError,
    NothingCompared,
    ResultError,
    SpecError,
    WorkloadFailed,
)

if TYPE_CHECKING:
    from pytest_aorta.plan.launch_plan import LaunchPlan
    from pytest_aorta.result.measurements import WorkloadResult
    from pytest_aorta.session.record import Comparison
    from pytest_aorta.session.runner import WorkloadRunner
    from pytest_aorta.session.world import DistributedWorld
    from pytest_aorta.verdict.statistics.decision import Outcome
    from pytest_aorta.verdict.verdicts import Verdicts

# Names that annotate tests and hooks -> their modules, which import numpy and scipy, so only a test that asks does.
_LATE = {
    "Comparison": "session.record",
    "DistributedWorld": "session.world",
    "LaunchPlan": "plan.launch_plan",
    "Outcome": "verdict.statistics.decision",
    "Verdicts": "verdict.verdicts",
    "WorkloadResult": "result.measurements",
    "WorkloadRunner": "session.runner",
}

__all__ = (
    "AortaError",
    "BaselineError",
    "Comparison",
    "ComparisonFailed",
    "DevicesUnavailable",
    "DistributedWorld",
    "LaunchError",
    "LaunchPlan",
    "LeaseError",
    "NothingCompared",
    "Outcome",
    "ResultError",
    "SpecError",
    "Verdicts",
    "WorkloadFailed",
    "WorkloadResult",
    "WorkloadRunner",
)

# Tests import the errors from here, and pytest's short summary has room for a short name.
for _name in set(__all__) - _LATE.keys():
    globals()[_name].__module__ = __name__


if not TYPE_CHECKING:  # a type checker would let every name pass

    def __getattr__(name: str) -> Any:
        """Return one of the names in ``_LATE``."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
