"""Schedules of a step against a baseline: one launch decides, and the verdict names what lost its overlap."""

import re

import pytest

from pytest_aorta.result.trace.profiled_steps import CollectiveCost, Costs, CostsOfRanks
from pytest_aorta.result.trace.schedule import distinct_schedules
from pytest_aorta.result.trace.step_graph import Node, Work
from pytest_aorta.verdict.applicability import choose_tolerances
from pytest_aorta.verdict.causes import cause_of
from pytest_aorta.verdict.metrics import parse_tolerances
from tests.unit.builders import IMPROVED, PASS, REGRESSION, baseline_of, make_facts, on_cpu
from tests.unit.step_graphs import fsdp_step, gather, product
from tests.unit.verdict.compared import check, launches_needed

GOOD = fsdp_step()
IN_LINE, WAITING, LATE = fsdp_step(in_line=True), fsdp_step(gather_waits=True), fsdp_step(prefetches=False)
NAMES = ("serialized_collectives", "scheduled_overlap_ratio", "scheduled_exposed_comm_ms", "scheduled_step_ms")


def launch(*ranks, build=on_cpu, **changes):
    return build(schedules=distinct_schedules(ranks or [GOOD, GOOD], range(len(ranks) or 2)), **changes)


def judged(*ranks, before=(), marked=None, **changes):
    """Return the verdicts of one launch against a baseline of unchanged launches, as it is stored."""
    baseline = baseline_of(*(before or [launch(), launch()])).condensed()
    return check(launch(*ranks, **changes), baseline=baseline, marked=parse_tolerances(marked or {}, "test"))


@pytest.mark.parametrize(
    ("graph", "outcomes", "detail"),
    [
        (GOOD, [PASS] * 4, ""),
        (
            IN_LINE,
            [REGRESSION] * 4,
            r"18 of 18 .*reduce_scatter of .* on the compute .* \(was: reduce-scatter stream\)",
        ),
        (
            WAITING,
            [REGRESSION] * 4,
            r"8 of 18 .*, 3 before: all_gather of layers.1 waits for aten::mm of .*0 \(was: no compute\), and 4 more",
        ),
        (
            LATE,
            [REGRESSION] * 4,
            r"8 of 18 .* all_gather of layers.4 waits for .*layers.5, call 2 \(was: aten::mm of layers.5\), and 4 more",
        ),
        (
            fsdp_step(in_line=True, place="train.py:7"),
            [REGRESSION] * 4,
            r"18 of 18 .*: all_gather of .* on the compute stream \(was: .*\) at train.py:7; reduce.* at train.py:7",
        ),
    ],
)
def test_one_launch_decides_and_names_what_lost_its_overlap(graph, outcomes, detail):
    found = judged(graph, graph)
    assert [found[name].outcome for name in NAMES] == outcomes
    assert re.fullmatch(detail, found[NAMES[0]].detail)


def test_a_new_collective_that_compute_hides_is_named():
    last = len(GOOD.nodes) - 1
    gather = Node(Work.COLLECTIVE, "all_gather", 1, [last], num_bytes=1 << 20, group="0", group_size=8, of="layers.9")
    more = GOOD.replace(nodes=[*GOOD.nodes, gather, Node(Work.COMPUTE, "aten::mm", 0, [last], flops=10**12)])
    row = judged(more, more)["scheduled_step_ms"]
    assert row.outcome is REGRESSION
    assert row.detail.startswith("3 of 19 collectives")
    assert row.detail.endswith("3 of 18 before: all_gather of layers.9 is new")


def test_a_hidden_collective_that_is_gone_is_named():
    last = len(GOOD.nodes) - 1
    gather = Node(Work.COLLECTIVE, "all_gather", 1, [last], num_bytes=1 << 24, group="0", group_size=8, of="layers.9")
    fewer, more = (
        GOOD.replace(nodes=[*GOOD.nodes, *new, Node(Work.COMPUTE, "aten::mm", 0, [last], flops=10**12)])
        for new in ([], [gather])
    )
    now, usual = (
        [CostsOfRanks([0, 1], Costs(collectives=[CollectiveCost("all_gather", calls)], operators={"aten::mm": calls}))]
        for calls in (18, 19)
    )
    row = judged(fewer, fewer, before=[launch(more, more, costs=usual)] * 2, costs=now)["scheduled_overlap_ratio"]
    assert (row.outcome, row.detail) == (REGRESSION, "all_gather 19 -> 18 a step")


def test_a_new_collective_is_named_by_its_own_line_also_if_others_of_its_kind_follow():
    def step(*places):
        sums = [gather(name="all_reduce")([number], place=place) for number, place in enumerate(places)]
        return GOOD.replace(nodes=[product(1 << 36)(), *sums])

    row = judged(step("a.py:5 f()", "a.py:6 g()", "a.py:8 h()"), before=[launch(step("a.py:5 f()", "a.py:7 h()"))])
    assert row[NAMES[0]].detail.endswith(": all_reduce is new at a.py:6 g()")


def test_a_sender_that_is_later_is_named():
    def ranks(*before):
        send = gather(name="send_recv")([*range(len(before))], sends_to=1)
        return GOOD.replace(nodes=[*before, send]), GOOD.replace(nodes=[gather(name="send_recv")(receives_from=0)])

    row = judged(*ranks(product(1 << 36)()), before=[launch(*ranks())])["scheduled_step_ms"]
    assert row.outcome is REGRESSION
    assert row.detail.endswith(": send_recv waits for rank 0 for 107 us (was: 0 us)")


def test_a_longer_step_with_collectives_as_hidden_names_new_operators():
    sin = Node(Work.COMPUTE, "aten::sin", 0, [len(GOOD.nodes) - 1], num_bytes=1 << 30)
    more = GOOD.replace(nodes=[*GOOD.nodes, sin])
    usual, longer = ([CostsOfRanks([0, 1], Costs(operators={"aten::mm": 99} | new))] for new in ({}, {"aten::sin": 1}))
    found = judged(more, more, before=[launch(costs=usual)] * 2, costs=longer)
    assert [found[name].outcome for name in NAMES] == [PASS, PASS, PASS, REGRESSION]
    assert found["scheduled_step_ms"].detail == "+ aten::sin x 1"


def test_overlap_that_was_gained_is_an_improvement():
    found = judged(GOOD, GOOD, before=[launch(LATE, LATE)])
    assert {found[name].outcome for name in NAMES} == {IMPROVED}


def test_the_worst_rank_decides_and_each_is_compared_with_itself():
    assert judged(GOOD, LATE, before=[launch(GOOD, LATE)])[NAMES[0]].outcome is PASS
    assert judged(LATE, GOOD, before=[launch(GOOD, LATE)])[NAMES[0]].outcome is REGRESSION


def test_a_graph_that_differs_between_recorded_launches_passes_up_to_their_worst():
    assert judged(LATE, LATE, before=[launch(), launch(LATE, LATE)])[NAMES[0]].outcome is PASS


def test_a_marker_allows_less_overlap():
    found = judged(LATE, LATE, marked=dict(zip(NAMES, ("200%", "60 points", "200%", "50%"), strict=True)))
    assert {found[name].outcome for name in NAMES} == {PASS}


def test_a_launch_that_lost_its_graph_fails_and_says_why():
    row = judged(None, None, graph_problem="the profiler was taken")[NAMES[0]]
    assert row.is_lost
    assert "the profiler was taken" in row.detail


def test_a_baseline_without_graphs_stays_valid_and_is_said_to_lack_them():
    found = judged(before=[on_cpu()])
    assert not {row.metric for row in found.rows} & {*NAMES}
    assert "the step's graph of streams is not in the baseline" in str(found.notes)


def test_what_a_graph_does_not_show_is_said():
    unseen = GOOD.replace(unseen=["waits of the host"])
    assert "does not show waits of the host" in str(judged(unseen, unseen, before=[launch(unseen, unseen)]).notes)


def test_on_cpu_ranks_the_schedule_is_compared_instead_of_timed_overlap():
    timed, marked = {"overlap_ratio": 0.5, "exposed_comm_ms": 1.0}, parse_tolerances({"overlap_ratio": "3 points"}, "")
    with_times, without = launch(metrics=timed), on_cpu(metrics=timed)
    assert not choose_tolerances(marked, with_times).keys() & timed.keys()
    assert "overlap_ratio" in choose_tolerances(marked, without)
    assert choose_tolerances(marked, launch(metrics=timed, build=make_facts)).keys() >= timed.keys()
    assert "overlap_ratio" in choose_tolerances(marked, with_times, asked=["overlap_ratio"])
    assert launches_needed(with_times, marked) == 1


@pytest.mark.parametrize(
    ("graph", "cause"),
    [(GOOD, "graph of streams is unchanged, so kernels or the machine changed"), (LATE, "8 of 18 collectives have")],
)
def test_lost_overlap_on_gpus_is_explained_by_the_graph_unless_it_is_unchanged(graph, cause):
    here, there = (
        launch(one, one, build=make_facts, metrics={"overlap_ratio": ratio})
        for one, ratio in ((graph, 0.5), (GOOD, 0.9))
    )
    assert cause in cause_of("overlap_ratio", [here], [there])
