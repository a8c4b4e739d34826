"""The errors a user can meet; each message names the thing, what was given and what is allowed."""

from __future__ import annotations


class AortaError(Exception):
    """Base of every error pytest-aorta raises on purpose."""


class SpecError(AortaError):
    """A marker, an option, a workload's yaml or a config value is wrong."""


class UsageError(AortaError):
    """The command ``aorta`` was given what it can't work with."""


class DevicesUnavailable(AortaError):
    """The world asks for more devices than this run may use."""


class LaunchError(AortaError):
    """The launch could not be started, or its ranks did not all end well.

    ``kind`` is the class of failure and ``rank`` the one that failed first, where there is such a one.
    """

    def __init__(self, message: str, kind: str = "start", rank: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank


class ResultError(AortaError):
    """A result file is missing, unreadable or does not fit its schema."""


class BaselineError(AortaError):
    """A baseline file is unreadable, from another version, or may not be written."""


class ComparisonFailed(AortaError):
    """At least one metric of a result got a failing verdict."""


class WorkloadFailed(AortaError):
    """The ranks ended well, and the workload's own checks found wrong values."""


class ColdLaunchWarning(UserWarning):
    """A warm launch was asked for and torchrun was used, since the fork server is not fit for it."""
