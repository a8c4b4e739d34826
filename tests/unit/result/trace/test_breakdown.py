"""Parts of a step's time, from made-up steps and from made-up traces of two planted causes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.overlap import Part, break_down
from pytest_aorta.result.trace.profiled_steps import HeadStart, StepOverlap
from tests.unit.builders import broken_rule, make_result, replace
from tests.unit.kineto_traces import boundary, event, kernel, overlap_with_host, trace

GATHER = "ncclDevKernel_AllGather_RING_LL"
AHEAD = HeadStart(lead_ms=50.0, attempts=1, step_ratio=1.0, succeeded=True)
MS = 1000


def traced(step_ms: float, *kernels: tuple[str, float, float]) -> list[StepOverlap]:
    """Return one step whose kernels run at ``(name, begin_ms, end_ms)``, with gathers on a stream of their own."""
    rows = [
        event("gpu_memcpy", name, begin * MS, (end - begin) * MS, 9, stream=9)
        if name == "copy"
        else kernel(name, begin * MS, (end - begin) * MS, stream=20 if name == GATHER else 7)
        for name, begin, end in kernels
    ]
    document = trace(boundary(-50, 1, 0), boundary(-40, 2, step_ms * MS), rows)
    return overlap_with_host(document).steps


def facts(ranks: list[list[StepOverlap]], p50_ms: float, as_run: list[list[StepOverlap]] | None = None) -> LaunchFacts:
    """Return the facts of a launch whose hosts were ahead in ``ranks``."""
    leads = [AHEAD] * len(ranks)
    times_ms = [[p50_ms] * 3] * len(ranks)
    return make_result(times_ms, overlap=ranks, overlap_as_run=as_run or ranks, head_start=leads).facts


def parts(**expected_ms: float):
    return pytest.approx(expected_ms, abs=0.01)


USUAL = traced(10, ("gemm", 0, 8), (GATHER, 2, 7), ("copy", 8, 9))


def test_parts_of_a_step_add_up_to_it():
    found = facts([USUAL, USUAL], 10.0)
    # The boundary's own kernel computes for a microsecond.
    assert found.breakdown_ms == parts(compute=8.0, straggler=0.0, exposed_comm=0.0, copy=1.0, idle=1.0)
    assert sum(found.breakdown_ms.values()) == pytest.approx(10.0)


def test_delay_on_one_rank_and_an_exposed_collective_are_told_apart():
    """Let rank 1 compute 3 ms longer, while rank 0 waits, and expose 2 ms of every gather."""
    waits = traced(15, ("gemm", 0, 8), (GATHER, 2, 7), (GATHER, 8, 13), ("copy", 13, 14))
    delayed = traced(15, ("gemm", 0, 8), (GATHER, 2, 7), ("spin", 8, 11), (GATHER, 11, 13), ("copy", 13, 14))
    found = facts([waits, delayed], 15.0)
    assert found.breakdown_ms == parts(compute=8.0, straggler=3.0, exposed_comm=2.0, copy=1.0, idle=1.0)
    assert found.description.critical_rank == 1


def test_waits_of_the_critical_rank_itself_count_as_its_exposed_communication():
    (step,) = USUAL
    waits = replace(step, compute_ms=step.compute_ms - 0.5, exposed_wait_ms=0.5)
    assert broken_rule(waits) is None
    found = facts([[waits]], 10.0)
    assert found.breakdown_ms == parts(compute=7.5, straggler=0.0, exposed_comm=0.5, copy=1.0, idle=1.0)


def test_slower_kernel_and_a_late_host_are_told_apart():
    """Let the product take 2 ms longer on both ranks, and rank 1's host be 4 ms late, which a head start hides."""
    ahead = traced(12, ("gemm", 0, 10), (GATHER, 2, 7), ("copy", 10, 11))
    waits = traced(16, ("gemm", 0, 10), (GATHER, 2, 7), (GATHER, 10, 14), ("copy", 14, 15))
    late = traced(16, ("gemm", 0, 10), (GATHER, 2, 7), ("copy", 14, 15))
    found = facts([ahead, ahead], 16.0, [waits, late])
    assert found.breakdown_ms == parts(compute=10.0, straggler=0.0, exposed_comm=0.0, copy=1.0, idle=5.0)
    assert found.description.critical_rank == 1


def test_communication_that_only_a_late_host_exposes_is_the_hosts():
    late = traced(15, (GATHER, 0, 5), ("gemm", 5, 13), ("copy", 13, 14))
    found = facts([USUAL], 15.0, [late])
    assert (found.breakdown_ms["exposed_comm"], found.description.critical_rank) == (0.0, None)
    assert found.breakdown_ms["idle"] == pytest.approx(6.0, abs=0.01)


def test_host_that_only_profiling_delays_costs_no_more_than_the_timed_step_leaves():
    disturbed = traced(30, ("gemm", 20, 28), (GATHER, 22, 27), ("copy", 28, 29))
    slow = traced(13, ("gemm", 0, 11), (GATHER, 2, 7), ("copy", 11, 12))
    waits = traced(13, ("gemm", 0, 8), (GATHER, 2, 7), (GATHER, 8, 11), ("copy", 11, 12))
    found = facts([waits, slow], 13.0, [disturbed, slow])
    assert (found.description.critical_rank, found.breakdown_ms["idle"]) == (1, pytest.approx(1.0, abs=0.01))
    assert found.breakdown_ms["straggler"] == pytest.approx(3.0, abs=0.01)


def test_steps_without_a_successful_head_start_are_taken_as_they_ran():
    ahead, as_run = [traced(40, ("gemm", 30, 38))], [USUAL]
    late = [replace(AHEAD, succeeded=False)]
    result = make_result([[10.0] * 3], overlap=ahead, overlap_as_run=as_run, head_start=late)
    assert result.facts.breakdown_ms == facts([USUAL], 10.0).breakdown_ms


def test_cpu_ranks_have_no_steps_with_a_head_start():
    result = make_result([[10.0] * 3] * 2, overlap=[USUAL, USUAL])
    assert result.facts.breakdown_ms == facts([USUAL, USUAL], 10.0).breakdown_ms


def test_launch_without_profiled_steps_has_no_parts():
    bare = make_result([[10.0] * 3] * 2).facts
    assert (bare.breakdown_ms, bare.description.critical_rank) == ({}, None)


@st.composite
def step_overlaps(draw) -> StepOverlap:
    compute, exposed, copy, idle = (draw(st.integers(0, 10**9)) for _ in range(4))
    hidden = draw(st.integers(0, compute))
    step = compute + exposed + copy + idle
    lengths = [step, compute, exposed + hidden, copy, idle, hidden]
    return StepOverlap(*(length / 1e6 for length in lengths))


LAUNCHES = st.integers(1, 3).flatmap(
    lambda steps: st.lists(
        st.tuples(*[st.lists(step_overlaps(), min_size=steps, max_size=steps)] * 2), min_size=1, max_size=4
    )
)


@given(LAUNCHES)
def test_parts_of_steps_that_ran_as_timed_add_up(ranks):
    for own in [[ahead[0]] for ahead, _ in ranks]:
        found = break_down([own], [own], own[0].step_ms)
        assert sum(found.parts_ms.values()) == pytest.approx(own[0].step_ms, abs=1e-6)
        assert found.parts_ms[Part.STRAGGLER] == 0.0


@given(LAUNCHES, st.floats(0.001, 5000))
def test_no_part_is_negative_and_the_host_never_costs_more_than_the_timed_step(ranks, timed_ms):
    found = break_down([ahead for ahead, _ in ranks], [as_run for _, as_run in ranks], timed_ms)
    assert all(part in found.parts_ms and found.parts_ms[part] >= 0 for part in Part)
    assert found.parts_ms[Part.IDLE] <= timed_ms
