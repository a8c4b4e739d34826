from __future__ import annotations

import pytest

from pytest_aorta.report.data import provenance_pairs
from tests.unit.builders import make_facts

GPU = {"torch": "2.11.0", "device": "cuda", "device_name": "NVIDIA H200"}
COMMAND = ["pytest", "-k", "two words"]
KNOWN = make_facts(commit="c0ffee00" * 5, branch="main", dirty=True, environment=GPU, command=COMMAND)
TEXT = {
    "commit": "c0ffee00c0ff and changes",
    "branch": "main",
    "measured": "2026-01-02T03:04:05Z",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "command": "pytest -k 'two words'",
}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {}),
        ({"environment": {"torch": "2.11.0", "device": "cpu"}}, {"device": "CPU ranks"}),
        ({"branch": None}, {"branch": "none (detached head)"}),
    ],
)
def test_provenance_of_a_launch_names_code_time_device_torch_and_command(changes, shown):
    assert dict(provenance_pairs(KNOWN.replace(**changes))) == TEXT | shown
    # The command of the run takes the place of a launch's own that is unknown.
    assert dict(provenance_pairs(KNOWN.replace(command=[], **changes), COMMAND)) == TEXT | shown
