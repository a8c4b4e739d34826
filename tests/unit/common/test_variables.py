from __future__ import annotations

import re

from pytest_aorta.common import variables
from pytest_aorta.common.files import PACKAGE_ROOT
from pytest_aorta.launch.process import guard
from pytest_aorta.result import folder

NAMES = [value for name, value in vars(variables).items() if name.isupper()]


def test_names_are_distinct_and_carry_the_prefix():
    assert len(NAMES) >= 12
    assert len(set(NAMES)) == len(NAMES)
    assert all(name.startswith("AORTA_") for name in NAMES)


def test_guard_uses_the_same_names_although_it_runs_without_the_package():
    assert guard.GUARD_PID_VARIABLE == variables.GUARD_PID
    assert guard.AGENT_FILE == folder.AGENT_FILE
    assert guard.SUSPENDED_FILE == folder.SUSPENDED_FILE


def test_no_other_module_spells_a_name_out():
    allowed = {PACKAGE_ROOT / "common/variables.py", PACKAGE_ROOT / "launch/process/guard.py"}
    spelled = [
        path
        for path in PACKAGE_ROOT.rglob("*.py")
        if path not in allowed and re.search(r"[\"']AORTA_[A-Z]", path.read_text(encoding="utf-8"))
    ]
    assert spelled == []
