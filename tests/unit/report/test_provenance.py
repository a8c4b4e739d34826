from __future__ import annotations

from pytest_aorta.report.data import provenance_pairs
from pytest_aorta.result.facts import launch_facts
from tests.unit.builders import make_facts, make_provenance, make_result, replace

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


def test_provenance_of_a_stored_launch_names_code_time_device_torch_and_command():
    assert dict(provenance_pairs(KNOWN)) == TEXT


def test_command_of_the_run_is_named_for_a_launch_that_has_none():
    assert dict(provenance_pairs(replace(KNOWN, command=[]), COMMAND)) == TEXT


def test_launch_on_cpu_ranks_names_them_as_the_device():
    facts = make_facts(environment={"torch": "2.11.0", "device": "cpu"})
    assert dict(provenance_pairs(facts))["device"] == "CPU ranks"


def test_detached_head_is_not_an_unknown_branch():
    assert dict(provenance_pairs(KNOWN.replace(branch=None)))["branch"] == "none (detached head)"


def test_command_of_a_result_reaches_its_facts():
    result = make_result([[1.0]], provenance=make_provenance(command=COMMAND))
    assert dict(provenance_pairs(launch_facts(result)))["command"] == TEXT["command"]
