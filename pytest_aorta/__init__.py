"""Performance, overlap and numerics tests for FSDP training, as a pytest plugin."""

from pytest_aorta.common.errors import (
    AortaError,
    BaselineError,
    ComparisonFailed,
    DevicesUnavailable,
    LaunchError,
    LeaseError,
    ResultError,
    SpecError,
    WorkloadFailed,
)

__all__ = (
    "AortaError", "BaselineError", "ComparisonFailed", "DevicesUnavailable", "LaunchError", "LeaseError",
    "ResultError", "SpecError", "WorkloadFailed",
)  # fmt: skip

# Tests import the errors from here, and pytest's short summary has room for a short name.
for _name in __all__:
    globals()[_name].__module__ = __name__
