"""What is claimed of two sides of a change, and what is not."""

import pytest

from pytest_aorta.verdict.attribution import SPEED_METRICS, Sides
from tests.unit.builders import H200, each_of, make_facts

OLD = {
    "commit": "a" * 40,
    "dirty": False,
    "measured_at": "2026-01-02T00:00:00Z",
    "system": {"kernel": "6.8", "packages": "a"},
}
EDITED = {"commit": "b" * 40}
LATER = {"measured_at": "2026-03-02T00:00:00Z"}
TORCH = {"environment": {"torch": "2.12.0", "device": "cuda", "device_name": H200}}
KERNEL, PACKAGES = {"system": {"kernel": "6.9", "packages": "a"}}, {"system": {"kernel": "6.8", "packages": "b"}}
VERSION = {"system": {"pytest_aorta": "2", "kernel": "6.8", "packages": "a"}}


def check(moment: str, ms: float):
    return make_facts(measured_at=moment, metrics=dict.fromkeys(SPEED_METRICS, ms))


SAME_SPEED = [check("2026-01-01T00:00:00Z", 5.0), check("2026-03-01T00:00:00Z", 5.1)]
SLOWER = [check("2026-01-01T00:00:00Z", 5.0), check("2026-03-01T00:00:00Z", 6.0)]
CASES = {
    "nothing": ({}, {}, None),
    "another torch": (TORCH, {}, "environment: torch 2.11.0 -> 2.12.0"),
    "another torch and other code long after": (TORCH | EDITED, {}, None),
    "another torch in the next version": (TORCH | EDITED, {"are_next": True}, "environment: torch 2.11.0 -> 2.12.0"),
    "other code": (EDITED, {}, None),
    "other code and steps": (EDITED | {"num_steps": 30}, {}, "method: measured steps 20 -> 30"),
    "other code, exact": (EDITED | KERNEL, {"is_exact": True}, f"code: {'a' * 12} -> {'b' * 12}; "),
    "other code and packages, exact": (EDITED | PACKAGES, {"is_exact": True}, None),
    "other code, in turn": (EDITED, {"in_turn": True}, f"code: {'a' * 12} -> {'b' * 12}; both were launched in turn"),
    "other code and torch, in turn": (EDITED | TORCH, {"in_turn": True}, None),
    "edited code, in turn": ({"dirty": True}, {"in_turn": True}, f"code: {'a' * 12} -> {'a' * 12} and changes; "),
    "other code at the same speed": (
        EDITED,
        {"checks": SAME_SPEED},
        f"code: {'a' * 12} -> {'b' * 12}; the speed check",
    ),
    "another speed": (EDITED, {"checks": SLOWER}, "machine: GEMM 5 -> 6 ms (+20%) in the speed check; copy "),
    "another speed, exact": ({}, {"checks": SLOWER, "is_exact": True}, None),
    "throttled": (
        {"throttled": "GPU 0 throttled (hw_slowdown)"} | EDITED,
        {},
        "machine: GPU 0 throttled (hw_slowdown); ",
    ),
    "another version of the plugin": (VERSION, {}, "method: pytest-aorta 1 -> 2"),
    "another version of the plugin and other code": (VERSION | EDITED, {}, None),
}


@each_of("changes, known, claimed", CASES)
def test_cause_is_claimed_only_where_facts_tell_it(changes, known, claimed):
    before = make_facts(**OLD | {"system": {"pytest_aorta": "1", **OLD["system"]}})
    after = make_facts(**OLD | LATER | changes)
    line = Sides(before, after, **known).line("test_a.py::test_x", lambda *words: f"pytest {' '.join(words)}")
    assert line.startswith(claimed) if claimed else line == ""
    assert ("; to settle it: " in line) is (bool(claimed) and not known.get("in_turn"))


@pytest.mark.parametrize(
    ("dirty", "remedy"),
    [(False, f"aorta bisect {'a' * 12} {'b' * 12} -- test_a.py::test_x"), (True, f"pytest --aorta-ab={'a' * 12}")],
)
def test_changes_that_are_in_no_commit_are_settled_by_a_comparison_with_the_commit_before(dirty, remedy):
    before, after = make_facts(**OLD), make_facts(**OLD | EDITED | {"dirty": dirty})
    line = Sides(before, after, is_exact=True).line("test_a.py::test_x", lambda *words: f"pytest {' '.join(words)}")
    assert line.endswith(f"; to settle it: {remedy}")
