"""Breakdowns of steps from known lanes, and interval algebra against sets of integers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.result.trace.overlap import (
    MAX_LANE_INTERVALS,
    PartAhead,
    Profile,
    clip,
    coarsened,
    difference,
    intersection,
    is_too_late,
    joined,
    joined_ahead,
    length,
    overlap_of,
    union,
)
from pytest_aorta.result.trace.profiled_steps import (
    Collective,
    CollectiveCalls,
    CollectiveTime,
    FamilyTime,
    HeadStart,
    StepOverlap,
)
from tests.unit.builders import broken_rule, each_of, make_rank, replace

MS = 1_000_000
LANES = ("compute", "copy", "wait", *Collective)


def lane(*rows):
    return union([(begin * MS, end * MS) for begin, end in rows])


def test_step_is_split_into_compute_hidden_and_exposed_communication_copies_and_idle():
    lanes = {
        "compute": lane((0, 4), (6, 8)),
        "all_gather": lane((2, 5)),
        "reduce_scatter": lane((4, 7)),
        "copy": lane((7, 9)),
    }
    capture = overlap_of(lanes, [(0, 10 * MS)])
    (step,) = capture.steps
    assert to_builtins(step) == {
        "step_ms": 10,
        "compute_ms": 6,
        "comm_ms": 5,
        "copy_ms": 2,
        "idle_ms": 1,
        "hidden_comm_ms": 3,
        "collectives": {
            "all_gather": {"total_ms": 3, "hidden_ms": 2},
            "reduce_scatter": {"total_ms": 3, "hidden_ms": 1},
        },
        "exposed_wait_ms": 0,
    }
    assert (step.exposed_comm_ms, step.overlap_ratio) == (2, 0.6)
    assert step.collectives["reduce_scatter"].exposed_ms == 2
    assert capture.metrics() == {"exposed_comm_ms": 2, "overlap_ratio": 0.6}
    assert capture.timeline["compute"] == [[0, 4], [6, 8]]


def test_copies_hide_no_communication():
    (step,) = overlap_of({"copy": lane((0, 5)), "all_reduce": lane((0, 5))}, [(0, 5 * MS)]).steps
    assert (step.hidden_comm_ms, step.exposed_comm_ms, step.idle_ms) == (0, 5, 0)


def test_wait_for_a_late_rank_is_neither_communication_nor_idle_time():
    lanes = {"compute": lane((0, 4)), "wait": lane((3, 6)), "all_gather": lane((6, 7)), "send_recv": lane((5, 6))}
    capture = overlap_of(lanes, [(0, 10 * MS)])
    (step,) = capture.steps
    assert (step.comm_ms, step.exposed_comm_ms, step.exposed_wait_ms, step.idle_ms) == (2, 2, 1, 3)
    assert broken_rule(step) is None
    assert capture.timeline["wait"] == [[3, 6]]


def test_interval_across_a_boundary_counts_in_both_steps():
    capture = overlap_of({"compute": lane((0, 20)), "send_recv": lane((8, 13))}, [(0, 10 * MS), (10 * MS, 20 * MS)])
    assert [step.comm_ms for step in capture.steps] == [2, 3]
    assert capture.timeline == {"compute": [[0, 10]], "send_recv": [[0, 3]]}
    assert capture.metrics()["overlap_ratio"] == 1


def test_ratio_weighs_steps_by_their_communication():
    lanes = {"compute": lane((0, 1)), "all_gather": lane((0, 1), (10, 13))}
    assert overlap_of(lanes, [(0, 10 * MS), (10 * MS, 20 * MS)]).metrics() == {
        "exposed_comm_ms": 1.5,
        "overlap_ratio": 0.25,
    }


def test_without_communication_there_is_no_ratio():
    capture = overlap_of({"compute": lane((0, 5))}, [(0, 5 * MS)])
    assert capture.steps[0].overlap_ratio is None
    assert capture.metrics() == {"exposed_comm_ms": 0}


def test_crowded_lane_is_drawn_in_fewer_pieces_and_measured_in_full():
    rows = [(2 * place, 2 * place + 1) for place in range(5 * MAX_LANE_INTERVALS)]
    capture = overlap_of({"compute": lane(*rows)}, [(0, rows[-1][1] * MS)])
    assert len(capture.timeline["compute"]) == MAX_LANE_INTERVALS
    assert capture.steps[0].compute_ms == len(rows)


@pytest.mark.parametrize(
    ("lanes", "windows", "message"),
    [({}, [], "no step was profiled"), ({"gossip": lane()}, [(0, 1)], r"no such lanes \['gossip'\]")],
)
def test_no_step_and_unknown_lane_are_refused(lanes, windows, message):
    with pytest.raises(ValueError, match=message):
        overlap_of(lanes, windows)


edges = st.integers(0, 50)
drawn = st.dictionaries(st.sampled_from(LANES), st.lists(st.tuples(edges, edges), max_size=8).map(union))


@given(drawn, st.lists(edges, min_size=2, max_size=5, unique=True).map(sorted))
def test_every_measured_step_keeps_the_sum_rules(lanes, bounds):
    for step in overlap_of(lanes, list(pairwise(bounds))).steps:
        assert broken_rule(step) is None


def test_capture_is_added_to_a_result_beside_its_own_metrics():
    result = make_rank([1.0], metrics={"tokens_per_s": 5.0})
    capture = overlap_of({"compute": lane((0, 5)), "all_gather": lane((0, 5))}, [(0, 5 * MS)])
    found = result.with_profile(capture)
    assert found.metrics == {"tokens_per_s": 5.0, "exposed_comm_ms": 0.0, "overlap_ratio": 1.0}
    assert found.profile == capture


def test_captures_of_some_steps_each_are_joined():
    """Compare with the capture of all steps at once."""
    bounds = [0, 5 * MS, 9 * MS, 15 * MS]
    lanes = {"compute": lane((0, 4), (6, 8), (10, 12)), "all_gather": lane((3, 6), (11, 13))}
    whole, two, one = (overlap_of(lanes, list(pairwise(edges))) for edges in (bounds, bounds[:3], bounds[2:]))
    gathers = CollectiveCalls("all_gather", "g", 2, 8, [1.0, 2.0, 3.0])
    exchanges = CollectiveCalls("all_to_all", "g", 2, 20, [1.0, 2.0, 3.0])
    two = replace(
        two,
        kernels={"gemm": FamilyTime(3.0, 2.0), "rare": FamilyTime(1.5, 0.5)},
        collectives=[replace(gathers, ms=[1.0, 2.0]), replace(exchanges, ms=[1.0, 2.0], num_bytes=15)],
    )
    one = replace(
        one,
        kernels={"gemm": FamilyTime(6.0, 2.0)},
        collectives=[replace(exchanges, ms=[3.0], num_bytes=30), replace(gathers, ms=[3.0])],
    )
    found = joined([two, one])
    assert (found.steps, found.timeline) == (whole.steps, whole.timeline)
    assert found.kernels == {"gemm": FamilyTime(4.0, 2.0), "rare": FamilyTime(1.0, pytest.approx(1 / 3))}
    assert found.collectives == [gathers, exchanges]
    assert joined([two]) is two


GOOD = StepOverlap(10, 6, 5, 2, 1, 3, {"all_gather": CollectiveTime(3, 2), "reduce_scatter": CollectiveTime(3, 1)})


def test_size_that_one_capture_does_not_know_is_unknown():
    capture = Profile([GOOD], {}, collectives=[CollectiveCalls("all_to_all", "g", 2, 8, [1.0])])
    unknown = replace(capture, collectives=[CollectiveCalls("all_to_all", "g", 2, None, [2.0])])
    assert joined([capture, unknown]).collectives == [CollectiveCalls("all_to_all", "g", 2, None, [1.0, 2.0])]


@each_of("each, keys", {"calls": (4096, 1), "keys": (1, 64)})
def test_joined_calls_stay_within_the_limits_of_a_result(each, keys):
    """Keep the first calls of a key, which are those of the same steps on every rank, and the longest keys."""
    parts = [
        [
            CollectiveCalls("all_gather", f"group {part if keys > 1 else 0} {key}", 2, 8, [float(key + 1)] * each)
            for key in range(keys)
        ]
        for part in range(3)
    ]
    found = joined([Profile([GOOD], {}, collectives=calls) for calls in parts]).collectives
    assert (len(found), len(found[0].ms)) == (keys, each)
    assert min(calls.ms[0] for calls in found) > (40 if keys > 1 else 0)
    assert convert(to_builtins(found), list[CollectiveCalls], "calls") == found


def part(num_steps: int, *, late: bool = False, ratio: float | None = 1.0, call: str | None = None, lead_ms=20.0):
    step = replace(GOOD, copy_ms=GOOD.copy_ms + late)
    lead = HeadStart(lead_ms, 3 if late else 1, ratio, succeeded=not late, blocked_by=call)
    return PartAhead(Profile([step] * num_steps, {}), lead)


AS_RUN = Profile([replace(GOOD, idle_ms=GOOD.idle_ms + 1, step_ms=GOOD.step_ms + 1)] * 7, {})


def test_half_of_the_steps_is_enough_and_fewer_are_not():
    assert not is_too_late([part(2, late=True)], 4)
    assert joined_ahead([part(2, late=True), part(2)], AS_RUN, 4).head_start.succeeded
    assert is_too_late([part(2, late=True)], 3)
    assert is_too_late([part(2), part(2, late=True), part(1, late=True)], 5)
    assert is_too_late([part(1, late=True)], 1)


def test_one_part_that_waits_for_the_device_is_enough_to_fail():
    blocked = part(2, late=True, call="cudaStreamSynchronize in aten::item")
    assert is_too_late([part(2), part(2), part(2), blocked], 8)
    found = joined_ahead([part(2), part(2), part(2), blocked], AS_RUN, 8)
    assert (found.head_start.succeeded, found.head_start.blocked_by) == (False, blocked.lead.blocked_by)


# Interval algebra against sets of integers: the moment ``m`` stands for ``[m, m + 1)``.
ends = st.integers(-20, 20)
drawn_rows = st.lists(st.tuples(ends, ends), max_size=12)


def moments(rows) -> set[int]:
    return {moment for begin, end in rows for moment in range(begin, end)}


def check_canonical(found) -> None:
    assert found.shape == (len(found), 2)
    flat = found.ravel()
    assert (np.diff(flat) > 0).all(), "sorted, disjoint, and none touches the next"


@given(st.lists(drawn_rows, max_size=4))
def test_union_has_the_moments_of_every_part(parts):
    found = union(*parts)
    check_canonical(found)
    assert moments(found) == set().union(*map(moments, parts))


@given(drawn_rows, drawn_rows)
def test_intersection_difference_and_length_are_those_of_sets(first, second):
    one, other = union(first), union(second)
    for operation, expected in (
        (intersection, moments(first) & moments(second)),
        (difference, moments(first) - moments(second)),
    ):
        found = operation(one, other)
        check_canonical(found)
        assert moments(found) == expected
        assert length(found) == len(expected)


@given(drawn_rows, ends, ends)
def test_clip_keeps_what_is_inside(rows, begin, end):
    assert moments(clip(union(rows), begin, end)) == moments(rows) & set(range(begin, end))


@given(drawn_rows, st.integers(1, 5))
def test_coarsened_covers_the_set_with_the_fewest_moments_added(rows, most):
    exact = union(rows)
    found = coarsened(exact, most)
    check_canonical(found)
    assert len(found) == min(most, len(exact))
    assert moments(found) >= moments(exact)
    gaps = sorted(int(gap) for gap in exact[1:, 0] - exact[:-1, 1])
    closed = gaps[: len(exact) - len(found)]
    assert length(found) - length(exact) == sum(closed)


@pytest.mark.parametrize("scale", [1, 10**15])
def test_nanoseconds_since_1970_are_exact(scale):
    one, other = union([(scale, scale + 5)]), union([(scale + 3, scale + 9)])
    assert intersection(one, other).tolist() == [[scale + 3, scale + 5]]
    assert difference(one, other).tolist() == [[scale, scale + 3]]
