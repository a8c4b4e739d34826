"""Kernel families as one compared metric, and as the cause of a regression."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import BaselineError, SpecError
from pytest_aorta.result.trace.families import MAX_FAMILIES, MAX_NAME
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveFacts, FamilyTime
from pytest_aorta.verdict.baseline import MAX_BYTES, MAX_LAUNCHES, read_baseline_file, write_baseline
from pytest_aorta.verdict.causes import moved
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.kernel_gate import REST, STEP_PART, allowed_change, parts_of, step_down
from pytest_aorta.verdict.learning import detection_lines, merged, objections
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances
from pytest_aorta.verdict.statistics.decision import Decision, Outcome
from pytest_aorta.verdict.verdicts import Missing
from tests.unit.builders import (
    default_priors,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    replace,
    stored,
    with_p50,
)
from tests.unit.simulated import at_most

METRIC = METRICS["kernel_ms"]
MARKED = parse_tolerances({"kernel_ms": "2%"}, "test")
# Times and calls in a step of 10 ms.
STEP = {
    "nvjet_tst_NTT": FamilyTime(4.0, 32),
    "nvjet_tst_TNN": FamilyTime(2.0, 32),
    "flash_fwd_kernel": FamilyTime(0.9, 8),
    "vectorized_elementwise_kernel[MulFunctor]": FamilyTime(0.4, 40),
    "reduce_kernel[sum_functor]": FamilyTime(0.02, 4),
    "ncclDevKernel_AllGather_RING_LL": FamilyTime(3.0, 16),
    "Memcpy HtoD": FamilyTime(0.5, 2),
}
ADDED = "vectorized_elementwise_kernel[AddFunctor]"


def launch(rng, kernels=STEP, noise=0.0005, build=make_facts):
    return build(
        kernels={name: FamilyTime(time.ms * (1 + rng.gauss(0, noise)), time.calls) for name, time in kernels.items()}
    )


def launches(count=3, seed=1, **changes):
    rng = random.Random(seed)
    return [launch(rng, **changes) for _ in range(count)]


def slower(name, ms):
    return STEP | {name: FamilyTime(STEP[name].ms + ms, STEP[name].calls)}


BASELINE = make_baseline(launches=stored(*launches(10, 0)))


def check(candidates, baseline=BASELINE, max_launches=None):
    allowed = max_launches or len(candidates)
    return StoredComparison("case", BASELINE.config, baseline, MARKED, default_priors, allowed).judge(candidates)[
        "kernel_ms"
    ]


def test_shown_baseline_is_that_of_the_estimate_and_counts_launches_with_a_late_host():
    center = launches(4, 0)
    late = [replace(one, metrics={"kernel_ms_as_run": 8.0}, kernels=slower("nvjet_tst_NTT", 1.0)) for one in center]
    mixed = [*center[:2], *late[2:]]
    row = check(launches(1), make_baseline(launches=stored(*mixed)), max_launches=5)
    [part] = [one for one in parts_of(METRIC, launches(1), mixed) if one.name == row.part]
    assert row.baseline == part.median_ms(mixed) != part.median_ms(mixed[:2])


def test_unchanged_kernels_pass_with_one_launch():
    row = check(launches(1), max_launches=5)
    assert (row.outcome, row.is_open) == (Outcome.PASS, False)


@pytest.mark.parametrize("name", ["nvjet_tst_NTT", "nvjet_tst_TNN", "flash_fwd_kernel"])
def test_family_that_takes_a_quarter_percent_of_the_step_longer_is_a_regression_with_its_name(name):
    row = check(launches(kernels=slower(name, 0.025)))
    assert row.outcome is Outcome.REGRESSION
    assert row.value == pytest.approx(STEP[name].ms + 0.025, rel=2e-3)
    assert row.baseline == pytest.approx(STEP[name].ms, rel=2e-3)
    assert row.delta == pytest.approx(0.025 / STEP[name].ms, rel=0.2)
    assert f"({name} +0.2" in str(row)
    assert "% of step allowed; kernels per step: " in str(row)


def test_further_families_are_named_too():
    kernels = slower("nvjet_tst_TNN", 0.2) | {"nvjet_tst_NTT": FamilyTime(4.15, 32)}
    assert "also nvjet_tst_NTT +1.4" in check(launches(kernels=kernels)).detail


def test_new_kernel_is_a_regression_by_its_time():
    row = check(launches(kernels=STEP | {ADDED: FamilyTime(0.025, 4)}))
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith(f"{REST} +0.2")
    assert f"new {ADDED} 0.025 ms (4 calls)" in row.detail
    assert (row.delta, row.change) == (None, "-")


def test_further_calls_of_a_kernel_are_a_regression():
    kernels = STEP | {"nvjet_tst_NTT": FamilyTime(4.025, 33)}
    row = check(launches(kernels=kernels))
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith(REST)


@pytest.mark.parametrize(
    "replaced",
    [
        {"nvjet_tst_NTT": FamilyTime(2.0, 16), "xmma_gemm_tn": FamilyTime(2.0, 16)},
        {"nvjet_tst_NTT": None, "xmma_gemm_tn": FamilyTime(4.0, 32)},
    ],
)
def test_kernel_that_replaces_another_in_equal_time_passes(replaced):
    kernels = {name: time for name, time in (STEP | replaced).items() if time is not None}
    assert check(launches(kernels=kernels)).outcome is Outcome.PASS


def test_kernel_that_replaces_another_and_is_slower_is_a_regression():
    kernels = {name: time for name, time in STEP.items() if name != "nvjet_tst_NTT"}
    row = check(launches(kernels=kernels | {"xmma_gemm_tn": FamilyTime(4.05, 32)}))
    assert row.outcome is Outcome.REGRESSION
    assert "new xmma_gemm_tn 4.05 ms (32 calls), gone nvjet_tst_NTT 4 ms (32 calls)" in row.detail


def test_communication_and_copies_are_not_compared():
    kernels = slower("ncclDevKernel_AllGather_RING_LL", 3.0) | {"Memcpy HtoD": FamilyTime(5.0, 2)}
    assert check(launches(kernels=kernels)).outcome is Outcome.PASS


def test_faster_family_is_an_improvement_and_the_baseline_stale():
    row = check(launches(kernels=slower("nvjet_tst_NTT", -0.3)))
    assert row.outcome is Outcome.IMPROVED
    assert row.delta == pytest.approx(-0.075, abs=0.01)
    assert "the baseline is stale" in row.detail


def test_single_slow_launch_asks_for_another_one():
    row = check(launches(1, kernels=slower("nvjet_tst_NTT", 0.1)), max_launches=5)
    assert (row.outcome, row.is_open) == (Outcome.INCONCLUSIVE, True)


def test_unchanged_launches_of_another_block_pass_and_a_slow_family_does_not():
    def elsewhere(kernels):
        return [one.replace(block="f" * 12) for one in launches(kernels=kernels)]

    clocked = {name: FamilyTime(time.ms * 1.003, time.calls) for name, time in STEP.items()}
    row = check(elsewhere(clocked))
    assert row.outcome is Outcome.PASS
    row = check(elsewhere(slower("nvjet_tst_NTT", 0.5)))
    assert row.outcome is Outcome.REGRESSION


def test_noise_above_the_tolerance_is_inconclusive_and_named():
    noisy = make_baseline(launches=stored(*launches(10, 0, noise=0.05)))
    row = check(launches(noise=0.05), noisy)
    assert (row.outcome, row.is_open) == (Outcome.INCONCLUSIVE, False)


def test_metric_that_one_side_lacks_is_missing():
    bare = make_baseline(launches=stored(make_facts()))
    row = check(launches(), bare)
    assert (row.outcome, row.missing) == (Outcome.MISSING, Missing.BASELINE_VALUE)
    assert "the baseline has no kernel_ms; record it again with" in row.detail
    assert check([make_facts()] * 3).missing is Missing.CANDIDATE_VALUE


def test_kernels_are_compared_by_default_and_operators_of_cpu_ranks_only_if_a_marker_names_them():
    comparison = StoredComparison("case", BASELINE.config, BASELINE, {}, default_priors, 3)
    assert comparison.judge(launches())["kernel_ms"].outcome is Outcome.PASS
    with pytest.raises(KeyError, match="kernel_ms was not compared"):
        comparison.judge(launches(build=on_cpu))["kernel_ms"]


def test_tolerance_of_step_is_refused():
    with pytest.raises(SpecError, match="tolerance of kernel_ms: got '2% of step', allowed is a percentage above 0%"):
        parse_tolerances({"kernel_ms": "2% of step"}, "test")


def test_operators_of_cpu_ranks_are_compared_no_finer_than_a_doubling():
    operators = {
        "aten::mm": FamilyTime(4.0, 32),
        "aten::add": FamilyTime(2.0, 8),
        "gloo:all_gather": FamilyTime(1.0, 4),
    }
    baseline = make_baseline(launches=stored(*launches(10, 0, kernels=operators, noise=0.05, build=on_cpu)))
    unchanged = launches(kernels=operators, noise=0.05, build=on_cpu)
    assert check(unchanged, baseline).outcome is Outcome.PASS
    tripled = operators | {"aten::mm": FamilyTime(12.0, 32)}
    row = check(launches(kernels=tripled, noise=0.05, build=on_cpu), baseline)
    assert (row.outcome, str(row.tolerance)) == (Outcome.REGRESSION, "100%")
    assert "aten::mm" in row.detail


def test_pairs_are_compared_family_by_family():
    def judge(kernels):
        comparison = PairedComparison("case", MARKED, default_priors, max_pairs=6)
        return comparison.judge(launches(6, 3, kernels=kernels), launches(6, 4))["kernel_ms"]

    assert judge(STEP).outcome is Outcome.PASS
    row = judge(slower("flash_fwd_kernel", 0.1))
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith("flash_fwd_kernel +1.0")
    assert judge(STEP | {ADDED: FamilyTime(0.1, 4)}).detail.startswith(REST)


def test_families_of_both_sides_with_equal_calls_are_compared_alone():
    new = launches(kernels=STEP | {ADDED: FamilyTime(0.3, 4), "nvjet_tst_TNN": FamilyTime(2.0, 33)})
    parts = {part.name: part.fraction for part in parts_of(METRIC, new, BASELINE.center_launches)}
    assert set(parts) == {"nvjet_tst_NTT", "flash_fwd_kernel", "vectorized_elementwise_kernel[MulFunctor]", REST}
    assert parts[REST] == pytest.approx(0.202, abs=1e-3)


@given(st.floats(1e-4, 10), st.floats(0, 1), st.floats(0, 1))
def test_allowed_change_is_never_beyond_the_tolerance_of_the_familys_own_time(tolerance, fraction, deviation):
    part = replace(parts_of(METRIC, launches(), launches())[0], fraction=fraction)
    assert 0 <= allowed_change(part, tolerance, deviation) <= tolerance * fraction
    rest = replace(part, name=REST)
    least = tolerance * STEP_PART
    assert least <= allowed_change(rest, tolerance, deviation) <= max(least, tolerance * fraction)


def holm(p_values, rate):
    """Return the number of rejected hypotheses by the step-down procedure as Holm states it."""
    for number, p_value in enumerate(sorted(p_values)):
        if p_value > rate / (len(p_values) - number):
            return number
    return len(p_values)


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=12), st.floats(1e-4, 0.2))
def test_shared_rate_rejects_what_holms_procedure_rejects(p_values, rate):
    parts = [
        replace(parts_of(METRIC, launches(1), launches(1))[0], name=str(number)) for number in range(len(p_values))
    ]

    def decide(part, own_rate):
        is_rejected = p_values[int(part.name)] <= own_rate
        return Decision(Outcome.REGRESSION if is_rejected else Outcome.PASS, 0.0, 0.0, 0.0, 3)

    rejected = [decision.outcome is Outcome.REGRESSION for decision in step_down(parts, rate, decide)]
    count = holm(p_values, rate)
    assert rejected == [p_value in sorted(p_values)[:count] for p_value in p_values]


def test_unchanged_families_alarm_as_rarely_as_one_metric_does():
    trials, alarms, missed = 300, 0, 0
    for seed in range(trials):
        baseline = make_baseline(launches=stored(*launches(10, 2 * seed, noise=0.001)))
        alarms += check(launches(3, 2 * seed + 1, noise=0.001), baseline).outcome is Outcome.REGRESSION
        planted = launches(3, 2 * seed + 1, noise=0.001, kernels=slower("flash_fwd_kernel", 0.025))
        missed += check(planted, baseline).outcome is not Outcome.REGRESSION
    assert alarms <= at_most(5e-4, trials)
    assert missed <= at_most(0.05, trials)


def test_baseline_of_kernels_can_be_recorded_and_its_sensitivity_shown():
    assert objections(launches(10, 0), MARKED, default_priors) == []
    (line,) = [line for line in detection_lines(BASELINE, MARKED, default_priors, 5) if "kernel_ms" in line]
    found = re.fullmatch(r"  kernel_ms: detects from (\+\d\.\d\d)% of step with 3, .* launches in any family", line)
    assert found is not None
    # Launches of another block, whose clock may differ.
    assert 0.5 <= float(found[1]) <= 5


def test_noisy_family_is_an_objection_to_recording_with_its_name():
    loud = [
        one.replace(kernels=one.kernels | {"flash_fwd_kernel": FamilyTime(0.9 + 0.05 * number, 8)})
        for number, one in enumerate(launches(10, 0))
    ]
    (problem,) = objections(loud, MARKED, default_priors)
    assert problem.startswith("kernel_ms: flash_fwd_kernel: standard deviation of launches is ")
    assert "% of step allowed; profile more steps" in problem


def test_launches_without_kernels_are_no_objection():
    assert objections([make_facts()] * 10, MARKED, default_priors) == []


def test_facts_give_the_time_of_compute_alone():
    value = METRIC.measure(make_facts(kernels=STEP))
    assert isinstance(value, float)
    assert math.isclose(value, 7.32)
    assert METRIC.measure(make_facts(kernels={"Memset": FamilyTime(1.0, 1)})) is None


def test_most_launches_with_most_families_of_the_longest_names_fit_in_a_file(tmp_path):
    kernels = {f"{number:0{MAX_NAME}}": FamilyTime(1.23456e-05, 12.3456) for number in range(MAX_FAMILIES)}
    gathers = {kind: CollectiveFacts(12.3456, 1.23456e9, 1.23456, [1.23456] * 8, 7) for kind in map(str, Collective)}
    full = make_facts(kernels=kernels, collectives=gathers)
    baseline = make_baseline(launches=stored(*[full] * MAX_LAUNCHES))
    path = write_baseline(tmp_path, baseline)
    assert path.stat().st_size < MAX_BYTES / 2
    assert read_baseline_file(path) == baseline


@pytest.mark.parametrize("before_ms", [0.0, 1e-5])
def test_family_that_took_no_time_in_the_baseline_is_a_regression_by_its_time(before_ms):
    free = make_baseline(launches=stored(*launches(10, 0, kernels=STEP | {ADDED: FamilyTime(before_ms, 4)})))
    row = check(launches(kernels=STEP | {ADDED: FamilyTime(0.1, 4)}), free)
    assert row.outcome is Outcome.REGRESSION
    assert f"{ADDED} +0.1 ms (4 calls, was 4)" in row.detail


def test_a_single_launch_is_no_objection_and_has_no_noise():
    assert objections(launches(1), MARKED, default_priors) == []


GONE = {name: time for name, time in STEP.items() if name != "vectorized_elementwise_kernel[MulFunctor]"}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kernels", [GONE, slower("nvjet_tst_NTT", -0.07)], ids=["gone", "faster"])
def test_few_launches_with_a_kernel_that_is_gone_or_faster_are_not_added_to_a_baseline(count, kernels):
    new = make_baseline(launches=stored(*launches(count, 7, kernels=kernels)))
    with pytest.raises(
        BaselineError, match=r"not shown to be unchanged:\n  kernel_ms: pass: .*-\d\.\d+% of step, 0\.1"
    ):
        merged(BASELINE, new, MARKED, default_priors, fresh=False)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_launches_with_unchanged_kernels_are_added_to_a_baseline(count):
    new = make_baseline(launches=stored(*launches(count, 7)))
    assert len(merged(BASELINE, new, MARKED, default_priors, fresh=False).launches) == 10 + count


BEFORE = {
    "nvjet_tst_NTT": FamilyTime(5.0, 32),
    "reduce_kernel[sum_functor]": FamilyTime(0.5, 16),
    "flash": FamilyTime(2.0, 4),
}
NOW = {"nvjet_tst_NTT": FamilyTime(6.9, 32), "triton_poi_fused_add": FamilyTime(0.4, 16), "flash": FamilyTime(2.001, 4)}
GATHERS = CollectiveFacts(calls=32.0, bus_bytes=2e8, transfer_ms=1.0, wait_ms=[0.1, 0.0, 0.1, 0.1], straggler=1)


def launch_of(kernels, build=make_facts, **collectives):
    return build(kernels=kernels, collectives=collectives)


def test_increased_new_and_gone_families_are_named_with_their_calls():
    assert moved([launch_of(NOW)] * 3, [launch_of(BEFORE)] * 3) == (
        "kernels per step: nvjet_tst_NTT +1.9 ms (32 calls, was 32), gone reduce_kernel[sum_functor] 0.5 ms "
        "(16 calls), new triton_poi_fused_add 0.4 ms (16 calls)"
    )


def test_at_most_three_families_of_a_kind_are_named_the_largest_change_first():
    slower = {f"kernel_{number}": FamilyTime(1.0 + number, 1) for number in range(5)}
    new = {f"new_{number}": FamilyTime(2.5 + number, 1) for number in range(2)}
    text = moved([launch_of(slower | new)], [launch_of(dict.fromkeys(slower, FamilyTime(0.5, 1)))])
    assert text == (
        "kernels per step: kernel_4 +4.5 ms (1 call, was 1), kernel_3 +3.5 ms (1 call, was 1), new new_1 3.5 ms "
        "(1 call), kernel_2 +2.5 ms (1 call, was 1), new new_0 2.5 ms (1 call)"
    )


def test_changes_within_the_range_of_launches_are_not_named():
    """Compare three launches with ten, as measured: matrix products of 9 ms vary by 1% between launches."""
    before_ms = (9.0, 9.01, 9.02, 9.03, 9.04, 9.05, 9.06, 9.08, 9.09, 9.3)
    before = [
        launch_of(
            {"gemm": FamilyTime(ms, 16), "rare": FamilyTime(ms % 9, 1)},
            all_gather=GATHERS.replace(transfer_ms=ms, wait_ms=[0.0, ms]),
        )
        for ms in before_ms
    ]

    def after(*gemm_ms):
        return [
            launch_of(
                {"gemm": FamilyTime(ms, 16), "rare": FamilyTime(0.03, 1), "spin": FamilyTime(0.08, 1)},
                all_gather=GATHERS.replace(transfer_ms=ms, wait_ms=[0.0, ms]),
            )
            for ms in gemm_ms
        ]

    assert moved(after(9.085, 9.1, 9.12), before) == "kernels per step: new spin 0.08 ms (1 call)"
    # One launch in ten may be an outlier.
    text = moved(after(9.095, 9.1, 9.12), before)
    assert "gemm +0.055 ms" in text
    assert "transfer 9.1 ms/step" in text
    assert "its peers wait 9.1 ms/step" in text
    assert "rare" not in text


def test_family_that_only_some_launches_lack_is_not_new():
    chosen, other = {"cutlass": FamilyTime(1.0, 4)}, {"nvjet": FamilyTime(1.0, 4)}
    text = moved([launch_of(chosen)] * 3, [launch_of(other)] * 7 + [launch_of(chosen)] * 3)
    assert text == ""


def test_on_cpu_ranks_they_are_operators():
    text = moved(
        [launch_of({"aten::mm": FamilyTime(3.0, 4)}, on_cpu)], [launch_of({"aten::mm": FamilyTime(1.0, 2)}, on_cpu)]
    )
    assert text == "operators per step: aten::mm +2 ms (4 calls, was 2)"


@pytest.mark.parametrize(("here", "there"), [(NOW, {}), ({}, BEFORE), (BEFORE, BEFORE), ({}, {})])
def test_without_profiled_steps_or_change_nothing_is_said(here, there):
    assert moved([launch_of(here)], [launch_of(there)]) == ""


def test_changes_too_small_to_explain_that_of_the_step_are_not_named():
    # NOW changes by 1.9 ms at most, and the step by 500 ms.
    slow = with_p50(launch_of(NOW, all_gather=GATHERS.replace(transfer_ms=9.0)), 510.0)
    assert moved([slow], [with_p50(launch_of(BEFORE, all_gather=GATHERS), 10.0)]) == ""


def test_communication_is_no_kernel_that_got_slower_since_its_time_includes_waits():
    late = {"ncclDevKernel_AllGather_RING_LL": FamilyTime(9.0, 32)}
    assert moved([launch_of(BEFORE | late)], [launch_of(BEFORE)]) == ""


def test_slower_transfer_is_told_from_a_late_rank():
    slower = CollectiveFacts(32.0, 2e8, 2.0, [0.1, 0.0, 0.1, 0.1], 1)
    assert moved([launch_of({}, all_gather=slower)], [launch_of({}, all_gather=GATHERS)]) == (
        "all_gather: transfer 2 ms/step, was 1, 32 calls, was 32, 200 MB on the bus, was 200, at 100 GB/s, was 200"
    )
    late = CollectiveFacts(32.0, 2e8, 1.0, [2.1, 2.0, 2.2, 0.0], 3)
    assert moved([launch_of({}, all_gather=late)], [launch_of({}, all_gather=GATHERS)]) == (
        "all_gather: rank 3 arrives late, its peers wait 2.1 ms/step, was 0.1"
    )


def test_ranks_that_wait_about_equally_arrive_late_in_turns():
    def text(*wait_ms):
        turns = CollectiveFacts(32.0, 2e8, 1.0, list(wait_ms), wait_ms.index(min(wait_ms)))
        return moved([launch_of({}, all_gather=turns)], [launch_of({}, all_gather=GATHERS)])

    in_turns = "all_gather: ranks arrive late in turns, each waits {} ms/step or more, was 0"
    assert text(19.0, 21.0) == in_turns.format("19")
    assert text(19.0, 21.0, 20.0, 20.0) == in_turns.format("19")
    # A rank that is late in two thirds of the calls waits half as long as its peer.
    assert text(10.5, 20.0) == in_turns.format("10.5")
    assert text(9.9, 20.0) == "all_gather: rank 0 arrives late, its peers wait 20 ms/step, was 0.1"


def test_waits_that_the_reference_has_too_are_no_turns():
    before = CollectiveFacts(32.0, 2e8, 1.0, [5.0, 5.0], 0)
    late = CollectiveFacts(32.0, 2e8, 1.0, [5.0, 9.0], 0)
    text = moved([launch_of({}, all_gather=late)], [launch_of({}, all_gather=before)])
    assert text == "all_gather: rank 0 arrives late, its peers wait 9 ms/step, was 5"


def test_transfer_of_unknown_size_has_no_bandwidth():
    before, now = (CollectiveFacts(4.0, 0.0, ms, [0.0, 0.0], 0) for ms in (1.0, 2.0))
    text = moved([launch_of({}, all_reduce=now)], [launch_of({}, all_reduce=before)])
    assert text == "all_reduce: transfer 2 ms/step, was 1, 4 calls, was 4"


def test_new_collective_has_nothing_to_compare_with():
    assert moved([launch_of({}, all_reduce=GATHERS)], [launch_of({}, all_gather=GATHERS)]) == ""


def test_regression_of_step_time_names_the_kernel_and_a_pass_does_not():
    before, slow = ([*launches_near(p50, 3, kernels=kernels)] for p50, kernels in ((10.0, BEFORE), (12.0, NOW)))
    baseline = make_baseline(launches=stored(*launches_near(10.0, 10, kernels=BEFORE)))
    comparison = StoredComparison("case", baseline.config, baseline, {}, default_priors, 3)
    row = comparison.judge(slow)["step_time_p50"]
    assert row.outcome is Outcome.REGRESSION
    assert "kernels per step: nvjet_tst_NTT +1.9 ms (32 calls, was 32), gone reduce" in str(row)
    assert "kernels" not in str(comparison.judge(before)["step_time_p50"])
    paired = PairedComparison("case", {}, default_priors, max_pairs=3)
    assert "kernels per step: nvjet_tst_NTT +1.9 ms" in str(paired.judge(slow, before)["step_time_p50"])
