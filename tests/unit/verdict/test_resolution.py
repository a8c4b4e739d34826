"""Remedies for baselines that are too small or too noisy to decide."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from pytest_aorta.verdict.applicability import choose_tolerances
from pytest_aorta.verdict.baseline import read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.learning import detection_lines
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.noise import platform_priors, unresolved
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.stored import least_tolerance
from pytest_aorta.verdict.statistics.variance import Variance, VarianceComponents, baseline_estimate
from tests.unit.builders import launches_near, make_baseline, make_facts, stored, with_p50
from tests.unit.simulated import run_stored

P50 = METRICS["step_time_p50"]
STORED = sorted(Path("baselines/nvidia-h200-x2-nccl").glob("*overlap-py*.json"))


def estimate(count: int, between=0.001):
    values = [0.02 * (-1) ** number for number in range(count)]
    side = Variance(0.02**2, 1)
    return baseline_estimate({"there": values}, [[values]], VarianceComponents(side, side, Variance(between**2, 6)))


def remedy(count: int, tolerance: float, between=0.001) -> str | None:
    return unresolved(P50, Tolerance(tolerance), estimate(count, between), "another", 5)


def test_remedy_is_the_least_number_of_launches_that_resolves_the_tolerance():
    text = remedy(3, 0.097)
    found = re.fullmatch(
        r"record (\d+) more launches \(--update-baselines --aorta-record=replace --aorta-launches=(\d+)\): the "
        r"baseline's 3 cannot resolve 9\.7%",
        text,
    )
    more, enough = int(found[1]), int(found[2])
    assert enough == 3 + more
    needed = [
        least_tolerance(estimate(3).with_launches(count), "another", max_launches=5) for count in (enough - 1, enough)
    ]
    assert needed[1] <= 0.097 < needed[0]


def test_tolerance_that_is_resolved_needs_no_remedy():
    assert remedy(10, 0.2) is None


def test_noise_between_blocks_that_no_number_of_launches_resolves_has_a_tolerance_as_the_remedy():
    text = remedy(3, 0.03, between=0.1)
    wider = re.fullmatch(r"no number of launches recorded at once resolves 3%; set a tolerance of (\d+)%, or .*", text)
    assert remedy(3, int(wider[1]) / 100, between=0.1) is None
    assert remedy(3, int(wider[1]) / 100 - 0.01, between=0.1) is not None


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
        tolerance = least_tolerance(few.with_launches(8), "new", max_launches=5)
        text = unresolved(P50, Tolerance(tolerance), few, "new", 5)
        enough = launches[: int(re.search(r"--aorta-launches=(\d+)", text)[1])]
        assert len(enough) <= 8
        candidate = [rng.gauss(0, 0.001) + rng.gauss(0, 0.005) for _ in range(5)]
        baseline = baseline_estimate({0: enough}, [[enough]], prior)
        passed += run_stored(candidate, baseline, tolerance).outcome is Outcome.PASS
    assert passed >= 0.85 * trials


def test_undecided_verdict_names_the_remedy_at_once_and_recording_says_the_same():
    few = make_baseline(launches=stored(*launches_near(10.0, 3, deviation=0.04, seed=2)))
    marked = {"step_time_p50": Tolerance(0.11)}
    comparison = StoredComparison(
        "case", few.config, few, marked, lambda _metric: VarianceComponents.of(0.04, 0.02, 8), 5
    )
    row = comparison.judge([with_p50(make_facts(block="f" * 12), 11.0)])["step_time_p50"]
    assert (row.outcome, row.is_open, row.launches) == (Outcome.INCONCLUSIVE, False, 1)
    remedy_text = row.detail.removeprefix("further launches could not decide; ")
    assert re.fullmatch(r"record \d more launch(es)? \(.*\): the baseline's 3 cannot resolve 11%", remedy_text)
    lines = detection_lines(few, marked, comparison.priors, 5)
    assert f"  step_time_p50: unchanged code may be inconclusive: {remedy_text}" in lines


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem.split("-test-")[-1])
def test_stored_gpu_baselines_have_fine_tolerances_of_overlap_and_can_decide(path):
    baseline = read_baseline_file(path)
    priors = platform_priors(Path("baselines"), baseline.platform, "cuda", baseline.case)
    comparison = StoredComparison(baseline.case, baseline.config, baseline, {}, priors, 5)
    launches = list(baseline.center_launches)
    chosen = choose_tolerances({}, launches[0])
    overlap = {"overlap_ratio": "3 points", "exposed_comm_ms": "1% of step", "overlap_saving": "3 points"}
    names = [name for name in overlap if name in chosen]
    assert names
    for name in names:
        assert comparison.undecidable(METRICS[name], chosen[name]) is None
        for launch in launches:
            row = comparison.judge([launch])[name]
            assert (row.outcome, str(row.tolerance)) == (Outcome.PASS, overlap[name])
