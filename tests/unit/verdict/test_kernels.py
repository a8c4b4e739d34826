"""The time of kernels as a metric, and kernel families as the cause of a regression."""

import math
import random
import re

import pytest

from pytest_aorta.result.trace.profiled_steps import CollectiveFacts, FamilyTime
from pytest_aorta.verdict.causes import moved
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances
from tests.unit.builders import PASS, REGRESSION, baseline_of, each_of, launches_near, make_facts, on_cpu, with_p50
from tests.unit.verdict import compared
from tests.unit.verdict.compared import compare, detection_lines, learn, left_out

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


BASELINE = baseline_of(*launches(10, 0))


def check(candidates, baseline=BASELINE):
    return compared.check(*candidates, baseline=baseline, marked=MARKED)["kernel_ms"]


def test_new_kernel_is_a_regression_that_is_named():
    row = check(launches(kernels=STEP | {ADDED: FamilyTime(0.3, 4)}))
    assert row.outcome is REGRESSION
    assert row.delta == pytest.approx(0.041, abs=0.002)
    assert f"new {ADDED} 0.3 ms (4 calls)" in row.detail
    row = compare(launches(kernels=slower("flash_fwd_kernel", 0.4)), launches(seed=2), MARKED, max_pairs=3)["kernel_ms"]
    assert row.outcome is REGRESSION
    assert "flash_fwd_kernel +0.4 ms (8 calls, was 8)" in row.detail


def test_kernels_are_compared_by_default_and_operators_of_cpu_ranks_if_marked():
    assert compared.check(*launches(), baseline=BASELINE)["kernel_ms"].outcome is PASS
    on_cpus = baseline_of(*launches(build=on_cpu))
    with pytest.raises(KeyError, match="kernel_ms was not compared"):
        compared.check(*launches(build=on_cpu), baseline=on_cpus)["kernel_ms"]


def test_operators_of_cpu_ranks_are_compared_by_the_tolerance_that_was_given():
    operators = {
        "aten::mm": FamilyTime(4.0, 32),
        "aten::add": FamilyTime(2.0, 8),
        "gloo:all_gather": FamilyTime(1.0, 4),
    }
    baseline = baseline_of(*launches(10, 0, kernels=operators, noise=0.05, build=on_cpu))
    tripled = operators | {"aten::mm": FamilyTime(12.0, 32)}
    row = check(launches(kernels=tripled, noise=0.05, build=on_cpu), baseline)
    assert (row.outcome, str(row.tolerance)) == (REGRESSION, "2%")
    assert "aten::mm" in row.detail


def test_baseline_of_kernels_can_be_recorded_and_its_sensitivity_shown():
    assert left_out(launches(10, 0), MARKED) == {}
    lines = detection_lines(BASELINE, MARKED)
    assert any(line.startswith("  kernel_ms: detects from +") for line in lines)


def test_facts_give_the_time_of_compute_alone():
    value = METRIC.measure(make_facts(kernels=STEP))
    assert isinstance(value, float)
    assert math.isclose(value, 7.32)
    assert METRIC.measure(make_facts(kernels={"Memset": FamilyTime(1.0, 1)})) is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_launches_with_unchanged_kernels_are_added_to_a_baseline(count):
    new = baseline_of(*launches(count, 7))
    assert len(learn(BASELINE, new, marked=MARKED).launches) == 10 + count


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
    text = moved([launch_of(NOW)] * 3, [launch_of(BEFORE)] * 3)
    for part in ("NTT +1.9 ms (32 calls, was 32), gone reduce", "] 0.5 ms (16 calls), new triton", "_add 0.4 ms"):
        assert part in text


def test_at_most_three_families_of_a_kind_are_named_the_largest_change_first():
    slower = {f"kernel_{number}": FamilyTime(1.0 + number, 1) for number in range(5)}
    new = {f"new_{number}": FamilyTime(2.5 + number, 1) for number in range(2)}
    text = moved([launch_of(slower | new)], [launch_of(dict.fromkeys(slower, FamilyTime(0.5, 1)))])
    assert re.findall(r"\w+_\d", text) == ["kernel_4", "kernel_3", "new_1", "kernel_2", "new_0"]


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

    assert moved(after(9.085, 9.1, 9.12), before).endswith("ranks: new spin 0.08 ms (1 call)")
    # One launch in ten may be an outlier.
    text = moved(after(9.095, 9.1, 9.12), before)
    assert "gemm +0.055 ms" in text
    assert "transfer 9.1 ms/step" in text
    assert "its peers wait 9.1 ms/step" in text
    assert "rare" not in text


CUTLASS, NVJET = launch_of({"cutlass": FamilyTime(1.0, 4)}), launch_of({"nvjet": FamilyTime(1.0, 4)})
LATE = launch_of(BEFORE | {"ncclDevKernel_AllGather_RING_LL": FamilyTime(9.0, 32)})
SLOWER = with_p50(launch_of(NOW, all_gather=GATHERS.replace(transfer_ms=9.0)), 510.0)
NOTHING_MOVED = {
    "family that only some launches lack": ([CUTLASS] * 3, [NVJET] * 7 + [CUTLASS] * 3),
    "no profiled steps before": ([launch_of(NOW)], [launch_of({})]),
    "no profiled steps now": ([launch_of({})], [launch_of(BEFORE)]),
    "no change": ([launch_of(BEFORE)], [launch_of(BEFORE)]),
    "no profiled steps": ([launch_of({})], [launch_of({})]),
    # NOW changes by 1.9 ms at most, and the step by 500 ms.
    "too small to explain the step's change": ([SLOWER], [with_p50(launch_of(BEFORE, all_gather=GATHERS), 10.0)]),
    "communication, whose time includes waits": ([LATE], [launch_of(BEFORE)]),
    "new collective": ([launch_of({}, all_reduce=GATHERS)], [launch_of({}, all_gather=GATHERS)]),
}


@each_of("here, there", NOTHING_MOVED)
def test_nothing_is_named_that_explains_no_change(here, there):
    assert not moved(here, there)


def test_on_cpu_ranks_they_are_operators():
    now, before = (launch_of({"aten::mm": FamilyTime(ms, calls)}, on_cpu) for ms, calls in ((3.0, 4), (1.0, 2)))
    assert "operators per step, mean over ranks: aten::mm +2 ms" in moved([now], [before])


TURNS = "ranks arrive late in turns, each waits {} ms/step or more, was 0"
TWO_WAIT = {"wait_ms": [5.0, 5.0], "straggler": 0}
FEW = {"calls": 4.0, "bus_bytes": 0.0, "wait_ms": [0.0, 0.0], "straggler": 0}
# What differs from GATHERS now and before -> what is said.
GATHERED = {
    "slower transfer": (
        {"transfer_ms": 2.0},
        {},
        "32 calls, was 32, 200 MB on the bus, was 200, at 100 GB/s, was 200",
    ),
    "late rank": (
        {"wait_ms": [2.1, 2.0, 2.2, 0.0], "straggler": 3},
        {},
        "rank 3 arrives late, its peers wait 2.1 ms/step, was 0.1",
    ),
    "two ranks in turns": ({"wait_ms": [19.0, 21.0], "straggler": 0}, {}, TURNS.format("19")),
    "four ranks in turns": ({"wait_ms": [19.0, 21.0, 20.0, 20.0], "straggler": 0}, {}, TURNS.format("19")),
    # A rank that is late in two thirds of the calls waits half as long as its peer.
    "late in two thirds": ({"wait_ms": [10.5, 20.0], "straggler": 0}, {}, TURNS.format("10.5")),
    "one rank is later": (
        {"wait_ms": [9.9, 20.0], "straggler": 0},
        {},
        "rank 0 arrives late, its peers wait 20 ms/step, was 0.1",
    ),
    "waits that the reference has too": (
        TWO_WAIT | {"wait_ms": [5.0, 9.0]},
        TWO_WAIT,
        "rank 0 arrives late, its peers wait 9 ms/step, was 5",
    ),
    "unknown size has no bandwidth": (
        FEW | {"transfer_ms": 2.0},
        FEW,
        "transfer 2 ms/step, was 1, 4 calls, was 4",
    ),
}


@each_of("now, before, text", GATHERED)
def test_slower_transfer_is_told_from_late_ranks(now, before, text):
    sides = (launch_of({}, all_gather=GATHERS.replace(**changes)) for changes in (now, before))
    assert moved(*([launch] for launch in sides)).endswith(text)


def test_regression_of_step_time_names_the_kernel_and_a_pass_does_not():
    before, slow = ([*launches_near(p50, 3, kernels=kernels)] for p50, kernels in ((10.0, BEFORE), (12.0, NOW)))
    baseline = baseline_of(*launches_near(10.0, 10, kernels=BEFORE))
    row = compared.check(*slow, baseline=baseline)["step_time_p50"]
    assert row.outcome is REGRESSION
    assert "kernels per step, mean over ranks: nvjet_tst_NTT +1.9 ms (32 calls, was 32), gone reduce" in str(row)
    assert "kernels" not in str(compared.check(*before, baseline=baseline)["step_time_p50"])
    assert "kernels per step, mean over ranks: nvjet_tst_NTT +1.9 ms" in str(
        compare(slow, before, max_pairs=3)["step_time_p50"]
    )
