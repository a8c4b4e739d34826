"""Comparisons of results whose workload's own checks failed, as ``distributed_world`` returns them."""

import pytest

from tests.unit.builders import each_of

FAILED = "distributed_world.run('toy')"
GOOD = "distributed_world.run('toy', step_ms=11.0)"
MESSAGE = "E  *WorkloadFailed: toy: 9 of its own checks failed on cpu-x2-gloo"


@pytest.fixture
def wrong(project):
    """The project, whose first launch has nine failed checks."""
    project.plant(by_launch={"1": {"wrong": 9}})
    return project


def test_result_with_failed_checks_is_not_compared_with_its_baseline(recorded):
    recorded.test_file("def test_speed(workload, distributed_world): workload.check(distributed_world.run('toy'))\n")
    recorded.run(passed=1)
    recorded.plant(wrong=9)
    recorded.run(shows=[MESSAGE, "aorta: 1 of 1 test failed, 1 test failed without a verdict*"], failed=1)


def test_result_with_failed_checks_is_not_recorded(wrong):
    wrong.one_test(f"workload.check({FAILED})")
    wrong.run("--update-baselines", "--aorta-launches=2", "--aorta-results=kept", shows=MESSAGE, failed=1)
    assert wrong.baseline_files() == []
    assert len(list(wrong.path.glob("kept/*/*"))) == 1


@pytest.mark.parametrize("arguments", ["metrics=['weight_hash']", "steps=1, metrics=['weight_hash']"])
@each_of("order", {"candidate": "failed, good", "reference": "good, failed"})
def test_result_with_failed_checks_is_not_compared_with_a_variant(wrong, arguments, order):
    wrong.one_test(f"failed, good = {FAILED}, {GOOD}; workload.compare({order}, {arguments})")
    wrong.run(shows=MESSAGE, failed=1)


def test_mapping_is_not_launched_for_a_comparison_with_failed_checks(wrong):
    wrong.one_test(f"failed = {FAILED}; workload.compare(failed, {{'workload': 'toy'}})")
    wrong.run("--aorta-results=kept", shows=MESSAGE, failed=1)
    assert len(list(wrong.path.glob("kept/*/*"))) == 1
