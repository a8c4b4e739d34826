"""Text on the kernels and collectives that a regression of time comes from."""

from __future__ import annotations

import pytest

from pytest_aorta.result.trace.profiled_steps import CollectiveFacts, FamilyTime
from pytest_aorta.verdict.causes import moved
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import (
    default_priors,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    stored,
    with_p50,
)

BEFORE = {
    "nvjet_tst_NTT": FamilyTime(5.0, 32),
    "reduce_kernel[sum_functor]": FamilyTime(0.5, 16),
    "flash": FamilyTime(2.0, 4),
}
NOW = {"nvjet_tst_NTT": FamilyTime(6.9, 32), "triton_poi_fused_add": FamilyTime(0.4, 16), "flash": FamilyTime(2.001, 4)}
GATHERS = CollectiveFacts(calls=32.0, bus_bytes=2e8, transfer_ms=1.0, wait_ms=[0.1, 0.0, 0.1, 0.1], straggler=1)


def launch(kernels, build=make_facts, **collectives):
    return build(kernels=kernels, collectives=collectives)


def test_increased_new_and_gone_families_are_named_with_their_calls():
    assert moved([launch(NOW)] * 3, [launch(BEFORE)] * 3) == (
        "kernels per step: nvjet_tst_NTT +1.9 ms (32 calls, was 32), gone reduce_kernel[sum_functor] 0.5 ms "
        "(16 calls), new triton_poi_fused_add 0.4 ms (16 calls)"
    )


def test_at_most_three_families_of_a_kind_are_named_the_largest_change_first():
    slower = {f"kernel_{number}": FamilyTime(1.0 + number, 1) for number in range(5)}
    new = {f"new_{number}": FamilyTime(2.5 + number, 1) for number in range(2)}
    text = moved([launch(slower | new)], [launch(dict.fromkeys(slower, FamilyTime(0.5, 1)))])
    assert text == (
        "kernels per step: kernel_4 +4.5 ms (1 call, was 1), kernel_3 +3.5 ms (1 call, was 1), new new_1 3.5 ms "
        "(1 call), kernel_2 +2.5 ms (1 call, was 1), new new_0 2.5 ms (1 call)"
    )


def test_changes_within_the_range_of_launches_are_not_named():
    """Compare three launches with ten, as measured: matrix products of 9 ms vary by 1% between launches."""
    before_ms = (9.0, 9.01, 9.02, 9.03, 9.04, 9.05, 9.06, 9.08, 9.09, 9.3)
    before = [
        launch(
            {"gemm": FamilyTime(ms, 16), "rare": FamilyTime(ms % 9, 1)},
            all_gather=GATHERS.replace(transfer_ms=ms, wait_ms=[0.0, ms]),
        )
        for ms in before_ms
    ]

    def after(*gemm_ms):
        return [
            launch(
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
    text = moved([launch(chosen)] * 3, [launch(other)] * 7 + [launch(chosen)] * 3)
    assert text == ""


def test_on_cpu_ranks_they_are_operators():
    text = moved([launch({"aten::mm": FamilyTime(3.0, 4)}, on_cpu)], [launch({"aten::mm": FamilyTime(1.0, 2)}, on_cpu)])
    assert text == "operators per step: aten::mm +2 ms (4 calls, was 2)"


@pytest.mark.parametrize(("here", "there"), [(NOW, {}), ({}, BEFORE), (BEFORE, BEFORE), ({}, {})])
def test_without_profiled_steps_or_change_nothing_is_said(here, there):
    assert moved([launch(here)], [launch(there)]) == ""


def test_changes_too_small_to_explain_that_of_the_step_are_not_named():
    # NOW changes by 1.9 ms at most, and the step by 500 ms.
    slow = with_p50(launch(NOW, all_gather=GATHERS.replace(transfer_ms=9.0)), 510.0)
    assert moved([slow], [with_p50(launch(BEFORE, all_gather=GATHERS), 10.0)]) == ""


def test_communication_is_no_kernel_that_got_slower_since_its_time_includes_waits():
    late = {"ncclDevKernel_AllGather_RING_LL": FamilyTime(9.0, 32)}
    assert moved([launch(BEFORE | late)], [launch(BEFORE)]) == ""


def test_slower_transfer_is_told_from_a_late_rank():
    slower = CollectiveFacts(32.0, 2e8, 2.0, [0.1, 0.0, 0.1, 0.1], 1)
    assert moved([launch({}, all_gather=slower)], [launch({}, all_gather=GATHERS)]) == (
        "all_gather: transfer 2 ms/step, was 1, 32 calls, was 32, 200 MB on the bus, was 200, at 100 GB/s, was 200"
    )
    late = CollectiveFacts(32.0, 2e8, 1.0, [2.1, 2.0, 2.2, 0.0], 3)
    assert moved([launch({}, all_gather=late)], [launch({}, all_gather=GATHERS)]) == (
        "all_gather: rank 3 arrives late, its peers wait 2.1 ms/step, was 0.1"
    )


def test_ranks_that_wait_about_equally_arrive_late_in_turns():
    def text(*wait_ms):
        turns = CollectiveFacts(32.0, 2e8, 1.0, list(wait_ms), wait_ms.index(min(wait_ms)))
        return moved([launch({}, all_gather=turns)], [launch({}, all_gather=GATHERS)])

    in_turns = "all_gather: ranks arrive late in turns, each waits {} ms/step or more, was 0"
    assert text(19.0, 21.0) == in_turns.format("19")
    assert text(19.0, 21.0, 20.0, 20.0) == in_turns.format("19")
    # A rank that is late in two thirds of the calls waits half as long as its peer.
    assert text(10.5, 20.0) == in_turns.format("10.5")
    assert text(9.9, 20.0) == "all_gather: rank 0 arrives late, its peers wait 20 ms/step, was 0.1"


def test_waits_that_the_reference_has_too_are_no_turns():
    before = CollectiveFacts(32.0, 2e8, 1.0, [5.0, 5.0], 0)
    late = CollectiveFacts(32.0, 2e8, 1.0, [5.0, 9.0], 0)
    text = moved([launch({}, all_gather=late)], [launch({}, all_gather=before)])
    assert text == "all_gather: rank 0 arrives late, its peers wait 9 ms/step, was 5"


def test_transfer_of_unknown_size_has_no_bandwidth():
    before, now = (CollectiveFacts(4.0, 0.0, ms, [0.0, 0.0], 0) for ms in (1.0, 2.0))
    text = moved([launch({}, all_reduce=now)], [launch({}, all_reduce=before)])
    assert text == "all_reduce: transfer 2 ms/step, was 1, 4 calls, was 4"


def test_new_collective_has_nothing_to_compare_with():
    assert moved([launch({}, all_reduce=GATHERS)], [launch({}, all_gather=GATHERS)]) == ""


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
