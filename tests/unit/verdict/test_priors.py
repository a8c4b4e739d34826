import math
import time

import pytest

from pytest_aorta.verdict import noise
from pytest_aorta.verdict.baseline import baseline_path, read_baseline_file, write_baseline
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import (
    BLOCK_GAP_S,
    MIN_CASES,
    StoredCase,
    blocks,
    default_variance,
    metric_blocks,
    platform_priors,
    prior_variance,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import launches_near, make_baseline, make_facts, on_cpu, stored, with_p50

P50 = METRICS["step_time_p50"]
PLATFORM = make_baseline().platform


def stamped(moment_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1767225600 + moment_s))


def at(moment_s: int, build=make_facts, **changes):
    """Return a launch ``moment_s`` seconds after the start of 2026."""
    return build(measured_at=stamped(moment_s), **changes)


def clusters(*launches) -> list[int]:
    """Return for each launch the number of its block, in order of appearance."""
    keys = blocks(launches)
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


def noisy_case(name: str, deviation: float, moments=(0,)):
    launches = [
        launch
        for number, moment in enumerate(moments)
        for launch in launches_near(10.0, 10, deviation=deviation, seed=number, measured_at=stamped(moment))
    ]
    return make_baseline(case=name, launches=stored(*launches))


GAP_S, CPU_GAP_S = BLOCK_GAP_S["cuda"], BLOCK_GAP_S["cpu"]


BLOCKS = {
    "pause": ([at(0), at(GAP_S), at(2 * GAP_S + 1)], [0, 0, 1]),
    "no pause": ([at(number * 3600) for number in range(20)], [0] * 20),
    "pause on CPU ranks": ([at(0, on_cpu), at(CPU_GAP_S, on_cpu), at(2 * CPU_GAP_S + 1, on_cpu)], [0, 0, 1]),
    "other boot": ([at(0), at(1, block="f" * 12), at(2)], [0, 1, 0]),
    "other order": ([at(2 * GAP_S), at(0), at(2 * GAP_S + 1), at(1)], [0, 1, 0, 1]),
}


@pytest.mark.parametrize(("launches", "expected"), BLOCKS.values(), ids=BLOCKS)
def test_block_is_one_boot_without_a_pause(launches, expected):
    assert clusters(*launches) == expected


def test_launches_are_grouped_by_revision_and_block():
    late = 2 * BLOCK_GAP_S["cuda"]
    old, here, later = (with_p50(at(moment), p50) for moment, p50 in ((0, 1.0), (0, math.e), (late, math.e**2)))
    baseline = make_baseline(launches=(*stored(old, center=False), *stored(here, later, here, revision=2)))
    assert transformed_by_revision(P50, baseline) == [[[0.0]], [[1.0, 1.0], [2.0]]]


def test_values_without_a_log_do_not_count_for_the_variance():
    loss = METRICS["final_loss"]
    launches = [make_facts(final_loss=value) for value in (None, -1.0, 0.0, 1.0)]
    assert transformed_values(loss, launches, launches) == [None, None, None, 0.0]
    assert transformed_by_revision(loss, make_baseline(launches=stored(*launches))) == [[[0.0]]]


def test_too_few_cases_leave_the_default():
    cases = [StoredCase(noisy_case(str(number), 0.1)) for number in range(MIN_CASES - 1)]
    assert prior_variance(P50, "cuda", cases) == default_variance(P50, "cuda")


def test_other_cases_give_the_prior_of_launches():
    cases = [StoredCase(noisy_case(str(number), deviation)) for number, deviation in enumerate((0.02, 0.02, 0.5))]
    variance = prior_variance(P50, "cuda", cases)
    assert math.sqrt(variance.within.value) == pytest.approx(0.02, rel=0.5)
    # Each case has one block, so nothing is known about other blocks.
    assert variance.between == default_variance(P50, "cuda").between


def test_cases_of_several_blocks_give_the_prior_of_blocks():
    late = 2 * BLOCK_GAP_S["cuda"]
    cases = [StoredCase(noisy_case(str(number), 0.001, (0, late))) for number in range(MIN_CASES)]
    assert prior_variance(P50, "cuda", cases).between.value < default_variance(P50, "cuda").between.value / 10


def test_stable_case_beside_noisy_ones_detects_what_it_does_alone():
    noisy = [StoredCase(noisy_case(str(number), 0.2)) for number in range(MIN_CASES)]
    stable = make_baseline(launches=stored(*launches_near(10.0, 10, deviation=0.002)))
    slower = launches_near(12.0, 3, deviation=0.002, seed=1)
    comparison = StoredComparison(
        stable.case, stable.config, stable, {}, lambda metric: prior_variance(metric, "cuda", noisy), 6
    )
    row = comparison.judge(slower)["step_time_p50"]
    assert (row.outcome, row.tolerance.value) == (Outcome.REGRESSION, 0.05)
    assert comparison.judge(launches_near(10.0, 1, deviation=0.002))["step_time_p50"].outcome is Outcome.PASS


def test_difference_between_revisions_is_not_variance():
    launches = (*stored(*launches_near(1.0, 10), center=False), *stored(*launches_near(10.0, 10), revision=2))
    cases = [StoredCase(make_baseline(case=str(number), launches=launches)) for number in range(MIN_CASES)]
    variance = prior_variance(P50, "cuda", cases)
    assert math.sqrt(variance.within.value) < 0.003
    assert variance.between == default_variance(P50, "cuda").between


def test_stored_neighbours_are_read_and_the_case_itself_is_not(tmp_path):
    for number in range(MIN_CASES):
        write_baseline(tmp_path, noisy_case(f"case {number}", 0.1))
    known = platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50)
    assert known.within.value > 10 * default_variance(P50, "cuda").within.value
    assert platform_priors(tmp_path, PLATFORM, "cuda", "case 1")(P50) == default_variance(P50, "cuda")


def test_stored_neighbours_are_read_once_by_all_tests_and_again_when_they_change(tmp_path, monkeypatch):
    for number in range(MIN_CASES):
        write_baseline(tmp_path, noisy_case(f"case {number}", 0.1))
    read = []
    monkeypatch.setattr(noise, "read_baseline_file", lambda path: read.append(path) or read_baseline_file(path))
    first, second = (platform_priors(tmp_path, PLATFORM, "cuda", case)(P50) for case in ("new", "newer"))
    assert (first == second, len(read)) == (True, MIN_CASES)
    changed = [write_baseline(tmp_path, noisy_case(f"case {number}", 0.001)) for number in range(2)]
    assert platform_priors(tmp_path, PLATFORM, "cuda", "new")(P50).within.value < first.within.value / 100
    assert read[MIN_CASES:] == changed


def test_unreadable_neighbour_is_passed_over(tmp_path):
    for number in range(MIN_CASES):
        write_baseline(tmp_path, noisy_case(f"case {number}", 0.1))
    before = platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50)
    baseline_path(tmp_path, PLATFORM, "broken").write_text("{")
    assert platform_priors(tmp_path, PLATFORM, "cuda", "a new case")(P50) == before


def test_platform_without_baselines_has_the_default(tmp_path):
    assert platform_priors(tmp_path / "absent", "cpu-x2-gloo", "cpu", "case")(P50) == default_variance(P50, "cpu")


def test_other_cases_say_nothing_of_the_noise_of_a_loss():
    noisy = [
        make_baseline(
            case=f"case {number}", launches=stored(*[make_facts(final_loss=loss) for loss in (1.0, 2.0, 3.0)])
        )
        for number in range(MIN_CASES)
    ]
    loss = METRICS["final_loss"]
    assert prior_variance(loss, "cpu", list(map(StoredCase, noisy))) == default_variance(loss, "cpu")


def test_launches_of_a_loss_are_one_block_whatever_the_machine():
    launches = [at(0), at(1, block="f" * 12), at(9 * BLOCK_GAP_S["cuda"])]
    assert len(set(metric_blocks(METRICS["final_loss"], launches))) == 1
    assert len(set(metric_blocks(P50, launches))) == 3
