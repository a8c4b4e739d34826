import re

import pytest

from benchmarks.public_reports.__main__ import HERE, Case, Fault, cases, findings

CASES = cases()
FAULTS = [
    pytest.param(case, fault, id=f"{case.name}: {fault.change}") for case in CASES.values() for fault in case.faults
]


def test_each_script_has_a_case():
    assert sorted(CASES) == sorted(path.stem for path in HERE.glob("scripts/*.py"))


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_each_fault_is_a_change_of_the_script_that_still_compiles(case, fault):
    source = (HERE / "scripts" / f"{case.name}.py").read_text(encoding="utf-8")
    planted = fault.planted(source)
    assert planted != source
    compile(planted, case.name, "exec")
    re.compile(fault.finds)


def test_edit_of_a_text_that_is_not_there_once_is_refused():
    with pytest.raises(ValueError, match="'x' is in the script 2 times"):
        Fault("doubled", {"x": "y"}, "").planted("x = x")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "E       Regression: loss (1 -> 2)\nE         cause\naorta: 1 of 1 test failed",
            "Regression: loss (1 -> 2)\ncause",
        ),
        ("aorta: no GPU\naorta: 1 test OK, 6 metrics unchanged\n= 1 passed", "aorta: 1 test OK, 6 metrics unchanged"),
        ("ERROR: usage\nno module named pytest", "no module named pytest"),
        ("", ""),
    ],
)
def test_findings_are_the_lines_of_the_failure_else_the_summary(output, expected):
    assert findings(output) == expected


def test_what_a_case_never_says_is_a_regular_expression():
    assert Case("a", "b").allows("anything")
    assert not Case("a", "b", never="replicas? differ").allows("cause: replicas differ")
