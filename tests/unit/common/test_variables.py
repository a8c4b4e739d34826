from __future__ import annotations

from pytest_aorta.common import variables
from pytest_aorta.launch.process import guard
from pytest_aorta.result import folder


def test_guard_uses_the_same_names_although_it_runs_without_the_package():
    assert guard.GUARD_PID_VARIABLE == variables.GUARD_PID
    assert guard.AGENT_FILE == folder.AGENT_FILE
    assert guard.SUSPENDED_FILE == folder.SUSPENDED_FILE
