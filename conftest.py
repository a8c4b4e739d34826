"""Hooks and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester", "tests.unit.fake_drivers"]
# An example may take long beside other work on the machine, and so may the making of examples.
settings.register_profile("no time limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time limits")


# pytest-randomly, which the tests of other plugins need, would shuffle and seed every run that a test starts. Importing
# hypothesis takes a third of a run's start, and no run needs it.
ADDOPTS = "-p no:randomly -p no:hypothesispytest"


def pytest_configure() -> None:
    """Give options to the runs that tests start as programs, and let them receive SIGINT."""
    os.environ["PYTEST_ADDOPTS"] = ADDOPTS
    # A script's background job ignores SIGINT, and so would every program that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Give the same options to the runs that pytester starts, and the same output in CI as on a developer's machine."""
    monkeypatch.setenv("PYTEST_ADDOPTS", ADDOPTS)  # pytester removes it
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def pytest_collection_finish() -> None:
    """Leave out what imports made, torch above all, of garbage collections: each run that a test starts makes one."""
    gc.collect()
    gc.freeze()
