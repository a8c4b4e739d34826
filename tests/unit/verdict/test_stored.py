"""Comparison with a stored baseline."""

import random
import re
from pathlib import Path

import pytest

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import choose_tolerances
from pytest_aorta.verdict.baseline import read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.noise import unresolved
from pytest_aorta.verdict.statistics.decision import StoredRule
from pytest_aorta.verdict.statistics.variance import Variance, VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import Decided, Open, Verdict
from tests.unit.builders import (
    IMPROVED,
    INCONCLUSIVE,
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    stamp,
    stored,
    with_p50,
)
from tests.unit.simulated import run_stored
from tests.unit.verdict.compared import CONFIG, STABLE, check, compare, detection_lines, outcomes


def test_same_facts_pass_every_default_metric_they_have():
    launches = [make_facts(metrics={"peak_memory_bytes": 1.0})] * 3
    verdicts = check(*launches, baseline=baseline_of(*launches * 3))
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "peak_memory_bytes", "weight_hash"], PASS)


def test_metric_where_more_is_better_regresses_downwards():
    baseline = baseline_of(*[make_facts(metrics={"tokens_per_s": 100.0})] * 10)
    marked = {"tokens_per_s": Tolerance(0.05)}
    for value, outcome in ((60.0, REGRESSION), (160.0, IMPROVED)):
        row = check(*[make_facts(metrics={"tokens_per_s": value})] * 3, baseline=baseline, marked=marked)[
            "tokens_per_s"
        ]
        assert (row.outcome, row.delta) == (outcome, pytest.approx(value / 100 - 1))
        assert row.low < row.delta < row.high


def test_center_is_the_median_of_the_center_launches_alone():
    launches = (*stored(*launches_near(20.0, 9), center=False), *stored(*launches_near(10.0, 9), revision=2))
    row = check(*[make_facts()] * 3, baseline=make_baseline(launches=launches))["step_time_p50"]
    assert (row.outcome, row.baseline) == (PASS, pytest.approx(10, 1e-3))


def lost_by(*losses: float, build=on_cpu) -> list[LaunchFacts]:
    """Return launches with these final losses, a day apart on different machines."""
    return [
        build(final_loss=loss, block=f"{number:012}", measured_at=stamp(86400 * (1 + number)))
        for number, loss in enumerate(losses)
    ]


LOSS = {"final_loss": Tolerance(0.02)}
NOISY_LOSSES = (2.0, 2.004, 1.996, 2.002, 1.998, 2.001, 1.999, 2.003, 1.997, 2.0)


def check_loss(*losses: float, recorded=(2.0,) * 10, build=on_cpu, max_launches=6) -> Verdict:
    baseline = baseline_of(*lost_by(*recorded, build=build))
    comparison = StoredComparison("case", CONFIG, baseline, LOSS, max_launches)
    return comparison.judge([build(final_loss=loss, block="here") for loss in losses])["final_loss"]


@pytest.mark.parametrize("build", [on_cpu, make_facts])
@pytest.mark.parametrize("recorded", [(2.0,), (2.0,) * 10, NOISY_LOSSES])
def test_unchanged_loss_passes_its_tolerance_at_the_first_launch(build, recorded):
    row = check_loss(2.0, recorded=recorded, build=build)
    assert row.state == Decided(PASS)


@pytest.mark.parametrize("build", [on_cpu, make_facts])
@pytest.mark.parametrize("recorded", [(2.0,), (2.0,) * 10, NOISY_LOSSES])
@pytest.mark.parametrize("loss", [2.1, 12.0])
def test_loss_beyond_its_tolerance_is_a_regression_whatever_the_noise_of_times(build, recorded, loss):
    assert check_loss(*[loss] * 3, recorded=recorded, build=build).outcome is REGRESSION


def test_loss_within_the_noise_of_its_baseline_is_no_regression():
    noisy = tuple(2.0 + 10 * (loss - 2.0) for loss in NOISY_LOSSES)
    row = check_loss(2.045, 2.05, 2.045, recorded=noisy, max_launches=3)
    assert row.outcome is INCONCLUSIVE


LOST_GPU = make_facts(environment={"torch": "2.11.0", "device": "cpu"}, weight_hashes={"10": "f" * 16})


def test_launch_that_computes_on_another_device_than_its_baseline_is_lost():
    verdicts = check(with_p50(LOST_GPU, 99.0), baseline=STABLE)
    assert outcomes(verdicts) == {"step_time_p50": MISSING, "weight_hash": MISSING}
    assert all(row.is_lost for row in verdicts.rows)
    assert "the ranks computed on cpu, those of the baseline on cuda; " in verdicts["step_time_p50"].detail


def test_baseline_without_a_device_among_its_facts_is_compared():
    nameless = baseline_of(*[make_facts(environment={})] * 3)
    assert check(make_facts(environment={"device": "cuda"}), baseline=nameless)["step_time_p50"].is_compared


LOSSES = {"final_loss": Tolerance(0.05)}


def check_losses(here, there, max_launches=5):
    baseline = baseline_of(*[make_facts(final_loss=value) for value in there])
    facts = [make_facts(final_loss=value) for value in here]
    return check(*facts, baseline=baseline, marked=LOSSES, max_launches=max_launches)["final_loss"]


SIGNED = [-1.0, 0.0, 1.0, -0.5, 0.5, -0.7, 0.7, 0.2, -0.2, 0.1]


def test_value_that_is_not_positive_passes_within_the_baselines_range():
    row = check_losses([0.9], SIGNED)
    assert (row.outcome, row.delta) == (PASS, None)
    assert "not positive" in row.reason


def test_value_beyond_the_range_of_signed_ones_asks_for_launches():
    seen = [check_losses([1.5, 1.6, 1.7, 1.8, 1.9][:count], SIGNED) for count in range(1, 6)]
    assert [row.outcome for row in seen] == [INCONCLUSIVE] * 4 + [REGRESSION]
    assert [isinstance(row.state, Open) for row in seen] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("here", "there", "outcome"),
    [
        ([-1.5, -1.6, -1.7, -1.8, -1.9], SIGNED, IMPROVED),
        ([0.1, 0.2, 99.0], SIGNED, PASS),  # one outlier
        ([-0.7, -0.5, -0.6], [-1.0], INCONCLUSIVE),  # beyond a single launch by chance
        ([0.5] * 2, [0.0] * 3, INCONCLUSIVE),  # a value that never varies
        ([0.5] * 3, [0.0] * 3, REGRESSION),
        ([0.0], [0.0] * 3, PASS),
        ([-99.0], [-100.0] * 3, PASS),  # within its tolerance
    ],
)
def test_signed_values_are_compared_by_their_ranges(here, there, outcome):
    assert check_losses(here, there, max_launches=max(3, len(here))).outcome is outcome


STORED = sorted(Path("baselines/nvidia-h200-x2-nccl").glob("*overlap-py*.json"))


def estimate(count: int, between=0.001):
    values = [0.02 * (-1) ** number for number in range(count)]
    side = Variance(0.02**2, 1)
    return baseline_estimate({"there": values}, [[values]], VarianceComponents(side, side, Variance(between**2, 6)))


def remedy(count: int, tolerance: float, between=0.001) -> str | None:
    return unresolved(StoredRule(estimate(count, between), "another", tolerance, 5), Tolerance(tolerance))


def test_remedy_is_the_least_number_of_launches_that_resolves_the_tolerance():
    text = remedy(3, 0.097)
    found = re.fullmatch(
        r"record (\d+) more launches \(--update-baselines --aorta-record=replace --aorta-launches=(\d+)\): the "
        r"baseline's 3 cannot resolve 9\.7%",
        text,
    )
    more, enough = int(found[1]), int(found[2])
    assert enough == 3 + more
    rule = StoredRule(estimate(3), "another", 0.0, 5)
    needed = [rule.with_launches(count).least_tolerance() for count in (enough - 1, enough)]
    assert needed[1] <= 0.097 < needed[0]


def test_noise_that_no_number_of_launches_resolves_has_a_tolerance_as_the_remedy():
    text = remedy(3, 0.03, between=0.1)
    wider = re.fullmatch(
        r"no number of launches recorded at once resolves 3%; set a tolerance of ([\d.]+)%, or .*", text
    )
    assert remedy(3, float(wider[1]) / 100, between=0.1) is None
    assert remedy(3, float(wider[1]) / 100 - 0.01, between=0.1) is not None


def test_more_launches_are_those_of_a_baseline_of_that_many():
    more, other = estimate(3).with_launches(20), estimate(20)
    assert more.counts == other.counts
    assert more.variance.within.df == pytest.approx(other.variance.within.df, rel=0.1)
    assert estimate(3).with_launches(3) == estimate(3)


def test_launches_that_are_advised_let_unchanged_code_pass():
    rng, passed, trials = random.Random(3), 0, 200
    side = Variance(0.005**2, 1)
    prior = VarianceComponents(side, side, Variance(0.001**2, 6))
    for _ in range(trials):
        center = rng.gauss(0, 0.001)
        launches = [rng.gauss(center, 0.005) for _ in range(20)]
        few = baseline_estimate({0: launches[:3]}, [[launches[:3]]], prior)
        tolerance = StoredRule(few, "new", 0.0, 5).with_launches(8).least_tolerance()
        text = unresolved(StoredRule(few, "new", tolerance, 5), Tolerance(tolerance))
        enough = launches[: int(re.search(r"--aorta-launches=(\d+)", text)[1])]
        assert len(enough) <= 8
        candidate = [rng.gauss(0, 0.001) + rng.gauss(0, 0.005) for _ in range(5)]
        baseline = baseline_estimate({0: enough}, [[enough]], prior)
        passed += run_stored(candidate, baseline, tolerance).outcome is PASS
    assert passed >= 0.85 * trials


def test_undecided_verdict_names_the_remedy_at_once_and_recording_says_the_same():
    few = baseline_of(*launches_near(10.0, 3, deviation=0.04, seed=1))
    marked = {"step_time_p50": Tolerance(0.11)}
    comparison = StoredComparison("case", few.config, few, marked, 5)
    row = comparison.judge([with_p50(make_facts(block="f" * 12), 11.43)])["step_time_p50"]
    assert (row.state, row.launches) == (Decided(INCONCLUSIVE), 1)
    remedy_text = row.detail.removeprefix("further launches could not decide; ")
    assert re.fullmatch(r"record \d more launch(es)? \(.*\): the baseline's 3 cannot resolve 11%", remedy_text)
    lines = detection_lines(few, marked)
    assert f"  step_time_p50: unchanged code may be inconclusive: {remedy_text}" in lines


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem.split("-test-")[-1])
def test_stored_gpu_baselines_have_fine_tolerances_of_overlap_and_can_decide(path):
    baseline = read_baseline_file(path)
    comparison = StoredComparison(baseline.case, baseline.config, baseline, {}, 5)
    launches = list(baseline.center_launches)
    chosen = choose_tolerances({}, launches[0])
    overlap = {"overlap_ratio": "3 points", "exposed_comm_ms": "1% of step", "overlap_saving": "3 points"}
    names = [name for name in overlap if name in chosen]
    assert names
    for launch in launches:
        rows = comparison.judge([launch])
        # What varies too much is left to the schedule, which is exact.
        assert rows["scheduled_overlap_ratio" if "overlap_ratio" in names else names[0]].outcome is PASS
        for name in names:
            expected = NOT_APPLICABLE if name in baseline.left_out else PASS
            assert (rows[name].outcome, str(rows[name].tolerance)) == (expected, overlap[name])
    for name, tolerance in chosen.items():
        if tolerance.value and METRICS[name].has_noise and name not in baseline.left_out:
            assert not unresolved(comparison.rule(METRICS[name], tolerance.value), tolerance)


def test_metric_that_one_of_several_launches_lost_is_missing():
    row = check(make_facts(), make_facts(weight_hashes={}), make_facts(), baseline=make_baseline())["weight_hash"]
    assert row.is_lost


def test_metric_that_the_baseline_lacks_is_missing():
    row = check(make_facts(), baseline=baseline_of(make_facts(weight_hashes={})))["weight_hash"]
    assert (row.outcome, row.is_lost) == (MISSING, False)
    assert "no weight_hash; record it again with --update-baselines --aorta-record=replace" in row.reason


@pytest.mark.parametrize("lacks", ["candidate", "reference"])
def test_metric_that_one_of_two_launches_lacks_is_missing(lacks):
    launches = {"candidate": make_facts(), "reference": make_facts()} | {lacks: make_facts(weight_hashes={})}
    row = compare([launches["candidate"]], [launches["reference"]])["weight_hash"]
    assert row.outcome is MISSING
