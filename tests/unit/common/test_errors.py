import pickle

import pytest

import pytest_aorta
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


@pytest.mark.parametrize(
    "kind", [LaunchError, WorkloadFailed, ComparisonFailed, ResultError, OwnError, ColdLaunchWarning]
)
def test_control_characters_in_a_message_are_shown_as_escapes(kind):
    error = kind("rank 0: \x1b[31mred\x1b[0m\n\tat\x9b2J train.py")
    shown = r"rank 0: \x1b[31mred\x1b[0m" + "\n\tat" + r"\x9b2J train.py"
    assert str(error) == shown
    assert error.args == (shown,)


EXCEPTIONS = [
    kind
    for kind in map(pytest_aorta.__dict__.get, pytest_aorta.__all__)
    if kind is not LaunchError and kind is not None
]


@pytest.mark.parametrize("error", [LaunchError("rank 3 died", "rank", 3), *(kind("why") for kind in EXCEPTIONS)])
def test_error_survives_pickling_under_the_name_that_users_import(error):
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
    assert getattr(pytest_aorta, type(error).__name__) is type(error)


def test_failed_comparison_is_a_failed_assertion():
    assert issubclass(pytest_aorta.ComparisonFailed, AssertionError)
