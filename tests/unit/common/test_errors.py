import pickle

import pytest

import pytest_aorta
from pytest_aorta.common.errors import (
    LaunchError,
)

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
