from __future__ import annotations

import traceback

import pytest

from pytest_aorta.common.errors import (
    AortaError,
    ColdLaunchWarning,
    ComparisonFailed,
    LaunchError,
    ResultError,
    WorkloadFailed,
)


class OwnError(AortaError):
    """An error class as another module than errors.py declares it."""


def test_traceback_shows_the_message_without_the_path_of_a_module():
    assert traceback.format_exception_only(LaunchError("boom")) == ["LaunchError: boom\n"]
    assert traceback.format_exception_only(OwnError("boom")) == ["OwnError: boom\n"]


@pytest.mark.parametrize(
    "kind", [LaunchError, WorkloadFailed, ComparisonFailed, ResultError, OwnError, ColdLaunchWarning]
)
def test_control_characters_in_a_message_are_shown_as_escapes(kind):
    error = kind("rank 0: \x1b[31mred\x1b[0m\n\tat\x9b2J train.py")
    shown = r"rank 0: \x1b[31mred\x1b[0m" + "\n\tat" + r"\x9b2J train.py"
    assert str(error) == shown
    assert error.args == (shown,)
