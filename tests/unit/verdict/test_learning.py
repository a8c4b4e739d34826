import re

import pytest

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.verdict.baseline import MAX_LAUNCHES, Baseline
from pytest_aorta.verdict.metrics import Tolerance
from tests.unit.builders import (
    baseline_of,
    each_of,
    growing,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    replace,
    stored,
    with_p50,
)
from tests.unit.verdict.compared import launches_needed, learn, left_out

P50 = {"step_time_p50": Tolerance(0.05)}


def baseline_near(p50: float = 10.0, count: int = 10, *, seed: int = 0, **changes) -> Baseline:
    return baseline_of(*launches_near(p50, count, seed=seed, **changes))


def refusal(old: Baseline, new: Baseline, marked=None) -> str:
    with pytest.raises(BaselineError) as caught:
        learn(old, new, marked=marked)
    message = str(caught.value)
    assert message.startswith(
        f"{new.case}: not added to the stored baseline, because it is not shown to be unchanged:\n  "
    )
    assert message.endswith("replace the baseline with --update-baselines --aorta-record=replace")
    return message


@pytest.mark.parametrize("stored_launches", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("added", [1, 2, 3])
@pytest.mark.parametrize("p50", [100.0, 20.0, 5.0, 1.0])
def test_few_launches_that_are_slower_or_faster_are_refused(stored_launches, added, p50):
    message = refusal(baseline_near(count=stored_launches), baseline_near(p50, count=added, seed=1))
    assert ": step_time_p50 " in message


def test_single_launch_that_noise_leaves_undecided_is_refused_with_the_remedy():
    message = refusal(baseline_near(), baseline_near(10.8, count=1, seed=1))
    assert "Inconclusive: step_time_p50 " in message
    assert "  next: if the code is unchanged, add more launches at once (--aorta-launches=10)\n" in message


def test_ten_launches_that_noise_leaves_undecided_are_not_advised_once_more():
    message = refusal(baseline_near(), baseline_near(seed=1), marked={"step_time_p50": Tolerance(0.0001)})
    assert "Inconclusive: step_time_p50 " in message
    assert "add more launches" not in message


def test_oldest_launches_are_dropped_but_no_center_launch():
    learned = baseline_near()
    for seed in range(1, 12):
        learned = learn(learned, baseline_near(seed=seed))
    assert len(learned.launches) == MAX_LAUNCHES
    assert learned.center_launches == baseline_near().center_launches
    last = [launch.facts for launch in baseline_near(seed=11).launches]
    assert [launch.facts for launch in learned.launches[-10:]] == last


def test_new_revision_of_many_launches_leaves_the_latest_of_the_old():
    learned = learn(baseline_near(count=60), baseline_near(count=50, seed=1), fresh=True)
    assert len(learned.launches) == MAX_LAUNCHES
    assert len(learned.center_launches) == 50
    assert learned.launches[0].facts == baseline_near(count=60).launches[10].facts


def test_reason_of_a_forced_set_belongs_to_the_revision_it_went_to():
    forced = replace(baseline_near(seed=1), forced={"1": "a loud night"})
    second = learn(baseline_near(), forced, fresh=True)
    assert second.forced == {"2": "a loud night"}
    assert learn(second, replace(baseline_near(seed=2), forced={"1": "again"})).forced == {"2": "again"}


def test_reason_goes_with_the_launches_of_its_revision():
    forced = replace(baseline_near(), forced={"1": "a loud night"})
    learned = learn(learn(forced, baseline_near(count=50), fresh=True), baseline_near(count=50), fresh=True)
    assert {launch.revision for launch in learned.launches} == {2, 3}
    assert learned.forced == {}


PLAIN = make_facts().environment


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ({}, {"weight_hashes": {"10": "f" * 16}}, "Regression: weight_hash"),
        ({}, {"p50": 20.0, "count": 1, "weight_hashes": {"10": "f" * 16}}, "Regression: weight_hash"),
        ({"weight_hashes": {}}, {}, "the baseline has no weight_hash"),
        ({}, {"launcher": "forkserver"}, "launcher is 'forkserver', the baseline's 'torchrun'"),
        ({}, {"environment": PLAIN | {"torch": "2.12.0"}}, "torch '2.11.0' -> '2.12.0'"),
        (
            {"weight_hashes": {}},
            {"weight_hashes": {}, "environment": PLAIN | {"torch": "2.12.0"}},
            "torch '2.11.0' -> '2.12.0'",
        ),
        (
            {"environment": PLAIN | {"num_threads": 1}},
            {"environment": PLAIN | {"num_threads": 2}},
            "num_threads 1 -> 2",
        ),
    ],
)
def test_launches_that_differ_are_refused_and_more_of_them_are_not_proposed(old, new, problem):
    message = refusal(baseline_near(**old), baseline_near(seed=1, **new))
    assert problem in message
    assert "add more launches" not in message


def test_hash_that_is_never_comparable_is_no_reason_to_refuse():
    loose = make_facts().environment | {"bitwise_reproducible": False}
    old, new = (baseline_near(seed=seed, environment=loose, weight_hashes={"1": f"{seed}" * 16}) for seed in (1, 2))
    assert len(learn(old, new).launches) == 20


def on_cpus(count: int, **changes) -> Baseline:
    return make_baseline(platform="cpu-x2-gloo", launches=stored(*[on_cpu(**changes)] * count))


def test_cpu_times_that_no_marker_names_are_no_reason_to_refuse():
    assert len(learn(on_cpus(1), on_cpus(1)).launches) == 2


def test_marked_cpu_times_of_another_machine_are_refused():
    message = refusal(on_cpus(5, block="f" * 12), on_cpus(5), P50)
    assert "times of CPU ranks are compared only within one hour on one machine" in message
    assert "add more launches" not in message


def test_exact_metrics_alone_take_one_launch():
    assert launches_needed(on_cpu(), {}, 10) == 1
    assert launches_needed(make_facts(), {"step_time_p50": Tolerance(None)}, 10) == 1


@each_of("marked", {"default": {}, "marked": P50})
@each_of("facts", {"cuda": make_facts(), "cpu": on_cpu()})
def test_metric_that_varies_too_much_is_left_out_with_the_remedy(facts, marked):
    launches = launches_near(10.0, 10, deviation=0.05, seed=1, environment=facts.environment)
    found = left_out(launches, marked)
    if facts.device == "cpu" and not marked:
        assert found == {}  # never compared
        return
    assert found["step_time_p50"].startswith("standard deviation of launches is ")
    assert "too large for a tolerance of 5%; measure more steps, set a tolerance of " in found["step_time_p50"]


def test_no_tolerance_is_advised_that_a_marker_does_not_take():
    launches = [with_p50(make_facts(), p50) for p50 in (1.0, 100.0) * 5]
    problem = left_out(launches, P50)["step_time_p50"]
    assert "set a tolerance" not in problem
    assert "compare with another version side by side (--aorta-ab)" in problem


def test_growth_within_launches_is_refused():
    memory = make_facts(**growing(0.1), metrics={"peak_memory_bytes": 9.0})
    for metric, facts, said in (
        ("step_time_p50", make_facts(step_time_growth=0.1), "slower .* 10.0%; use more warmup"),
        ("peak_memory_bytes", memory, r"memory grows .* \+10.0%"),
    ):
        [(name, why)] = left_out([facts] * 5, {}).items()
        assert name == metric
        assert re.search(said, why)


def test_memory_whose_parts_contradict_each_other_is_refused():
    with pytest.raises(ValueError, match="memory_growth_bytes: got 1 values for 2 ranks"):
        make_facts(memory_bytes=[1, 2], memory_growth_bytes=[1.0])


def test_few_launches_are_not_judged_by_their_variance():
    assert left_out([with_p50(make_facts(), p50) for p50 in (10.0, 20.0, 30.0, 5.0)], {}) == {}
