from __future__ import annotations

import math
import time

import pytest

from pytest_aorta.verdict.baseline import baseline_path, write_baseline
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.priors import (
    MIN_CASES,
    SITTING_GAP_S,
    default_spread,
    epochs_of,
    places,
    platform_priors,
    prior_spread,
    sittings,
)
from tests.unit.builders import launches_near, make_baseline, make_facts, on_cpu, stored, with_p50

P50 = METRICS["step_time_p50"]
PLATFORM = make_baseline().platform


def at(moment_s: int, build=make_facts, **changes):
    """A launch so long after the start of 2026."""
    start_s = 1767225600
    return build(recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start_s + moment_s)), **changes)


def clusters(*launches) -> list[int]:
    """For each launch, the number of its sitting in order of appearance."""
    keys = sittings(launches)
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


def noisy_case(name: str, spread: float, moments=(0,)):
    launches = [
        launch
        for number, moment in enumerate(moments)
        for launch in launches_near(10.0, 10, spread=spread, seed=number, recorded_at=at(moment).recorded_at)
    ]
    return make_baseline(case=name, launches=stored(*launches))


def test_launches_one_after_another_are_one_sitting():
    assert clusters(at(0), at(60), at(3600)) == [0, 0, 0]


def test_pause_ends_a_sitting():
    gap_s = SITTING_GAP_S["cuda"]
    assert clusters(at(0), at(gap_s), at(2 * gap_s + 1)) == [0, 0, 1]


def test_sitting_lasts_as_long_as_no_pause_does():
    assert clusters(*[at(number * 3600) for number in range(20)]) == [0] * 20


def test_cpus_sitting_ends_sooner():
    gap_s = SITTING_GAP_S["cpu"]
    assert gap_s < SITTING_GAP_S["cuda"]
    assert clusters(at(0, on_cpu), at(gap_s, on_cpu), at(2 * gap_s + 1, on_cpu)) == [0, 0, 1]


def test_other_boot_is_another_sitting_however_near():
    assert clusters(at(0), at(1, sitting="f" * 12), at(2)) == [0, 1, 0]


def test_order_of_launches_does_not_matter_to_their_sittings():
    late = 2 * SITTING_GAP_S["cuda"]
    assert clusters(at(late), at(0), at(late + 1), at(1)) == [0, 1, 0, 1]


def test_launches_are_grouped_by_epoch_and_sitting():
    late = 2 * SITTING_GAP_S["cuda"]
    old, here, later = (with_p50(at(moment), p50) for moment, p50 in ((0, 1.0), (0, math.e), (late, math.e**2)))
    baseline = make_baseline(launches=(*stored(old, anchor=False), *stored(here, later, here, epoch=2)))
    assert epochs_of(P50, baseline) == [[[0.0]], [[1.0, 1.0], [2.0]]]


def test_values_without_a_log_are_no_part_of_the_spread():
    loss = METRICS["final_loss"]
    launches = [make_facts(final_loss=value) for value in (None, -1.0, 0.0, 1.0)]
    assert places(loss, launches, launches) == [None, None, None, 0.0]
    assert epochs_of(loss, make_baseline(launches=stored(*launches))) == [[[0.0]]]


def test_hash_has_no_log():
    assert places(METRICS["weight_hash"], [make_facts()], [make_facts()]) == [None]


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_metric_has_a_default_spread(metric, device):
    spread = default_spread(metric, device)
    assert 0 < spread.within.value <= spread.between.value


def test_tails_scatter_more_than_medians_and_memory_less():
    tail, middle, memory = (
        default_spread(METRICS[name], "cuda").within.value
        for name in ("step_time_tail5", "step_time_p50", "peak_memory_bytes")
    )
    assert tail > middle > memory


def test_too_few_cases_leave_the_default():
    cases = [noisy_case(str(number), 0.1) for number in range(MIN_CASES - 1)]
    assert prior_spread(P50, "cuda", cases) == default_spread(P50, "cuda")


def test_other_cases_give_the_prior_of_launches():
    cases = [noisy_case(str(number), spread) for number, spread in enumerate((0.02, 0.02, 0.5))]
    spread = prior_spread(P50, "cuda", cases)
    assert math.sqrt(spread.within.value) == pytest.approx(0.02, rel=0.5)
    # Of one sitting each: nothing is known of others.
    assert spread.between == default_spread(P50, "cuda").between


def test_cases_of_several_sittings_give_the_prior_of_sittings():
    late = 2 * SITTING_GAP_S["cuda"]
    cases = [noisy_case(str(number), 0.001, (0, late)) for number in range(MIN_CASES)]
    assert prior_spread(P50, "cuda", cases).between.value < default_spread(P50, "cuda").between.value / 10


def test_cases_of_single_launches_tell_nothing():
    cases = [make_baseline(case=str(number)) for number in range(5)]
    assert prior_spread(P50, "cuda", cases) == default_spread(P50, "cuda")


def test_levels_of_epochs_are_no_spread():
    launches = (*stored(*launches_near(1.0, 10), anchor=False), *stored(*launches_near(10.0, 10), epoch=2))
    cases = [make_baseline(case=str(number), launches=launches) for number in range(MIN_CASES)]
    spread = prior_spread(P50, "cuda", cases)
    assert math.sqrt(spread.within.value) < 0.003
    assert spread.between == default_spread(P50, "cuda").between


def test_stored_neighbours_are_read_and_the_case_itself_is_not(tmp_path):
    for number in range(MIN_CASES):
        write_baseline(tmp_path, noisy_case(f"case {number}", 0.1))
    known = platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50)
    assert known.within.value > 10 * default_spread(P50, "cuda").within.value
    assert platform_priors(tmp_path, PLATFORM, "cuda", "case 1")(P50) == default_spread(P50, "cuda")


def test_unreadable_neighbour_is_passed_over(tmp_path):
    for number in range(MIN_CASES):
        write_baseline(tmp_path, noisy_case(f"case {number}", 0.1))
    before = platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50)
    baseline_path(tmp_path, PLATFORM, "broken").write_text("{")
    assert platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50) == before


def test_platform_without_baselines_has_the_default(tmp_path):
    assert platform_priors(tmp_path / "absent", "cpu-x2-gloo", "cpu", "case")(P50) == default_spread(P50, "cpu")
