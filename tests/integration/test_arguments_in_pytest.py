"""Arguments of the fixtures' methods that are not allowed."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("workload.check(None)", "check: got None, allowed is a result that run() or run_script() returned"),
        ("workload.check([result])", "check: got [[]WorkloadResult(*..., allowed is a result that run() or *"),
        ("workload.check(result, label=3)", "check: label is 3, allowed is a text of one line"),
        ("workload.check(result, label='')", "check: label is '', allowed is *"),
        (r"workload.check(result, label='a\nb')", r"check: label is 'a\nb', allowed is *"),
        ("workload.compare(result, result, label=' ')", "compare: label is ' ', allowed is a text of one line"),
        ("workload.compare(result, result, metrics=3)", "compare: metrics is 3, allowed is a list of names *"),
        (
            "workload.compare(result, result, metrics='step_time_p50')",
            "compare: metrics is 'step_time_p50', allowed is a list of names such as [[]'step_time_p50'], or None",
        ),
        (
            "workload.compare(result, result, metrics=[3, []])",
            "compare: metrics is [[]3, [[]]], allowed is a list of names *",
        ),
        (
            "workload.compare(result, result, locate='x')",
            "compare: locate is 'x', allowed is True, False or None",
        ),
        (
            "workload.run_script('train.py', environment=3)",
            "script '*train.py': environment: got 3, allowed is a mapping from names to texts",
        ),
        (
            "workload.run_script('train.py', environment={1: 'a', 'B': 'c'})",
            "script '*train.py': environment: got [[]'1', 'B'], allowed is *",
        ),
        ("distributed_world.again(3)", "again: got 3, allowed is a result that *"),
        (
            "distributed_world.again(result, reference='main')",
            "again: reference is 'main', allowed is True or False",
        ),
        ("workload.expect_regression()", "expect_regression: names no metric; *"),
        ("workload.expect_regression(3)", "expect_regression: metrics [[]'3'] are unknown; allowed are *"),
    ],
)
def test_argument_that_is_not_allowed_is_an_error_that_names_it(project, call, message):
    project.write("train.py", "")
    project.one_test(f"result = workload.run('toy'); {call}")
    ran = project.run()
    ran.stdout.fnmatch_lines([f"E  *SpecError: {message}"])
    ran.stdout.no_fnmatch_line("*contextlib*")
    ran.stdout.fnmatch_lines(["aorta: 1 test; 1 test failed without a verdict"])
