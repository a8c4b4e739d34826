"""Errors for users; each message names the cause, the given value and the allowed values."""

from pathlib import Path
from types import TracebackType

from pytest_aorta.common.text import visible


class AortaError(Exception):
    """Base class of the errors that pytest-aorta raises on purpose.

    Messages quote logs and errors of ranks, so control characters in them are shown as escapes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(message))


class SpecError(AortaError):
    """A marker, an option, a workload's YAML file or a config value is wrong."""


class UsageError(AortaError):
    """The command ``aorta`` was given invalid arguments."""


class DevicesUnavailable(AortaError):
    """The world asks for more devices than this run may use, or the devices can't be listed."""


class LeaseError(AortaError):
    """Resources can't be leased: too many requested, held by others for too long, or an unusable folder."""


class LaunchError(AortaError):
    """The launch could not be started, or at least one rank failed.

    Attributes:
        kind: Class of the failure.
        rank: The rank that failed first; None if unknown.
        run_dir: The folder of a launch that ran; None if unknown.
        not_finite_step: The step in or after which a value was NaN or infinite first; None without one.
    """

    def __init__(
        self,
        message: str,
        kind: str = "start",
        rank: int | None = None,
        run_dir: Path | None = None,
        not_finite_step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.run_dir = run_dir
        self.not_finite_step = not_finite_step


class ResultError(AortaError):
    """A result file is missing, unreadable or does not match its schema."""


class BaselineError(AortaError):
    """A baseline file is unreadable, was written by another version, or may not be written."""


class ComparisonFailed(AortaError, AssertionError):
    """At least one metric of a result has a failing verdict.

    Attributes:
        metrics: Names of the metrics with a failing verdict, in the order of the message.
    """

    def __init__(self, message: str, metrics: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.metrics = metrics


class NothingCompared(BaselineError, AssertionError):
    """Metrics have nothing to be compared with, which a test that expects a regression must not take for one."""


class WorkloadFailed(AortaError):
    """Every rank exited normally, but the workload's own checks found wrong values."""


class ColdLaunchWarning(UserWarning):
    """A warm launch was requested, but torchrun was used because the fork server was unfit.

    The message quotes the server's log, so control characters in it are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


# With the decorators of the standard library that call this package's functions.
_OWN = ("pytest_aorta.", "functools", "contextlib")


def drop_frames(error: BaseException) -> None:
    """Leave the frames of this package out of an error's traceback, below the frame where it begins.

    The message of an :class:`AortaError` is complete, so a test's traceback ends in the test. That of a fixture of this
    package ends in the fixture: pytest shows all of its own frames if there are no others.
    """
    kept = error.__traceback__
    while kept is not None:
        below = first = kept.tb_next
        while below is not None and _module(below).startswith(_OWN):
            below = below.tb_next
        if below is None and first is not None and _module(kept).startswith("_pytest."):
            first.tb_next = None
            return
        kept.tb_next = below
        kept = below


def _module(traceback: TracebackType) -> str:
    return str(traceback.tb_frame.f_globals.get("__name__", ""))
