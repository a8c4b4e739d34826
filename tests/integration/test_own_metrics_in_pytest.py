"""Metrics that a workload or script itself records."""

import pytest

CHECK = "workload.check(workload.run('toy'))"
GOOD, WORSE, LOST = {"accuracy": 0.9}, {"accuracy": 0.009}, {}
HIGHER, LOWER, EXACT = (f"@pytest.mark.tolerance(accuracy='{text}')" for text in ("-2%", "+2%", "exact"))
NO_ACCURACY = [
    "E *Missing: accuracy, *the launch has no accuracy*",
    "E *accept  *--update-baselines --aorta-record=replace*",
]


@pytest.mark.parametrize(
    ("marker", "recorded", "now", "outcomes", "shows"),
    [
        ("", GOOD, LOST, {"failed": 1}, NO_ACCURACY),
        ("", GOOD, WORSE, {"passed": 1}, "*1 not compared (no tolerance)*"),
        ("", LOST, GOOD, {"passed": 1}, "*1 not compared (no tolerance)*"),
        (HIGHER, GOOD, GOOD, {"passed": 1}, "*3 metrics unchanged*"),
        (HIGHER, GOOD, WORSE, {"failed": 1}, "E *Regression: accuracy *(0.9 -> 0.009, limit -2%)*"),
        (HIGHER, GOOD, LOST, {"failed": 1}, NO_ACCURACY),
        (LOWER, GOOD, WORSE, {"passed": 1}, "*1 improved*"),
        (LOWER, WORSE, GOOD, {"failed": 1}, "E *Regression: accuracy *(0.009 -> 0.9, limit +2%)*"),
        (EXACT, GOOD, GOOD, {"passed": 1}, "*3 metrics unchanged*"),
        (EXACT, GOOD, {"accuracy": 0.9001}, {"failed": 1}, "E *Regression: accuracy *(0.9* -> 0.9001*, limit exact)*"),
    ],
)
def test_own_metric_is_compared_by_its_marker_or_for_presence(project, marker, recorded, now, outcomes, shows):
    project.one_test(CHECK, marker)
    project.plant(metrics=recorded)
    project.run("--update-baselines", passed=1)
    project.plant(metrics=now)
    project.run("--aorta-fail-on=not-applicable,missing", shows=shows, **outcomes)


@pytest.mark.parametrize(
    ("given", "shows"),
    [
        ("2%", "*'accuracy'[]] are unknown*for a metric that the workload or script records, write '+5%'*"),
        ("+2 points", "*tolerance of accuracy: got '+2 points', allowed is a percentage above 0%*"),
        ("-0%", "*tolerance of accuracy: got '-0%', allowed is a percentage above 0%*"),
    ],
)
def test_tolerance_of_an_own_metric_needs_a_direction_and_a_percentage(project, given, shows):
    project.one_test(CHECK, f"@pytest.mark.tolerance(accuracy={given!r})")
    project.run(shows=shows, errors=1)


def test_variants_of_a_test_may_record_different_metrics(project):
    project.one_test("first = workload.run('toy'); workload.compare(first, distributed_world.again(first))")
    project.plant(by_launch={"1": {"metrics": GOOD}})
    project.run(passed=1)
