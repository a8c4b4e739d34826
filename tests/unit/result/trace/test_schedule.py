"""Step graphs on the nominal machine: what can be hidden, and what is."""

from itertools import combinations

import pytest

from pytest_aorta.result.trace.schedule import MACHINES, distinct_schedules, play
from pytest_aorta.result.trace.step_graph import Node, StepGraph, Work
from tests.unit.step_graphs import fsdp_step, gather, product

# 130 us of a product, and 14 + 1.9 + 130.8 us of an all-gather between two ranks.
PRODUCT, GATHER = product(flops=83_570_500_000), gather(num_bytes=94_176_000)


def graph(*nodes: Node) -> StepGraph:
    return StepGraph(["compute", "all-gather"], list(nodes))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([PRODUCT(), GATHER()], (0, 0.886, 16.7, 146.7)),
        ([PRODUCT(), GATHER(after=[0])], (1, 0.0, 146.7, 276.7)),
        ([GATHER(), PRODUCT(after=[0])], (1, 0.0, 146.7, 276.7)),
        ([PRODUCT(), GATHER(after=[0]), PRODUCT(after=[0])], (0, 0.886, 16.7, 276.7)),
        # An operator that moves few bytes runs beside the gather in the least time of a kernel; it does not count.
        ([PRODUCT(), GATHER(after=[0]), product(num_bytes=8)(after=[0])], (1, 0.014, 144.7, 276.7)),
        # Without a product, all compute counts.
        ([GATHER(), product(num_bytes=8)()], (0, 0.014, 144.7, 146.7)),
        ([GATHER(), GATHER(after=[0])], (2, 0.0, 293.4, 293.4)),
    ],
)
def test_what_can_be_hidden_and_what_is(nodes, expected):
    found = play(graph(*nodes))
    values = (found.serialized, found.overlap_ratio, 1000 * found.exposed_ms, 1000 * found.step_ms)
    assert values == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("fault", "serialized"),
    [({}, 3), ({"in_line": True}, 18), ({"gather_waits": True}, 8), ({"prefetches": False}, 8)],
)
def test_serialized_collectives_of_a_step_are_those_between_all_products(fault, serialized):
    found = fsdp_step(**fault)
    assert play(found).serialized == serialized == _by_paths(found)


def _by_paths(step: StepGraph) -> int:
    """Count them by asking for a path between each pair of nodes."""
    reached = {(number, number) for number in range(len(step.nodes))}
    for later, node in enumerate(step.nodes):
        reached |= {(first, later) for earlier in node.after for first, last in [*reached] if last == earlier}
    kinds = {work: [n for n, node in enumerate(step.nodes) if node.work is work] for work in Work}
    pairs = [(min(pair), max(pair)) for pair in combinations(range(len(step.nodes)), 2)]
    beside = {pair for pair in pairs if pair not in reached}
    return sum(
        not any((min(one, other), max(one, other)) in beside for other in kinds[Work.COMPUTE])
        for one in kinds[Work.COLLECTIVE]
    )


def test_a_collective_says_what_it_waits_for_and_what_waits_for_it():
    row = play(fsdp_step()).issued[3]
    assert (row.name, row.of, row.stream) == ("all_gather", "layers.3", "all-gather")
    assert (row.waits_for, row.awaited_by) == ("aten::mm of layers.1", "aten::mm of layers.3")


def test_ranks_with_equal_graphs_have_one_schedule():
    good, bad = fsdp_step(), fsdp_step(in_line=True)
    assert [group.ranks for group in distinct_schedules([good, bad, good, good], [0, 1, 2, 5])] == [[0, 2, 5], [1]]


SEND, RECEIVE = ({key: 1} for key in ("sends_to", "receives_from"))


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "late_us", "step_us"),
    [
        # What is received was sent when the product began, or when it ended.
        ([GATHER(**SEND), PRODUCT()], [GATHER(receives_from=0)], [0.0], [146.7, 146.7]),
        ([PRODUCT(), GATHER([0], **SEND)], [GATHER(receives_from=0)], [130.0], [276.7, 276.7]),
        # A stage answers, and the first one has waited for both.
        (
            [PRODUCT(), GATHER([0], **SEND), GATHER([1], **RECEIVE)],
            [GATHER(receives_from=0), PRODUCT([0]), GATHER([1], sends_to=0)],
            [130.0, 130.0],
            [553.4, 553.4],
        ),
        # Each receives first, as in a batch; and a message that was sent before the step.
        (
            [GATHER(**RECEIVE), GATHER([0], **SEND)],
            [GATHER(receives_from=0), GATHER([0], sends_to=0)],
            [0.0, 146.7],
            [293.4, 440.1],
        ),
        ([GATHER(**RECEIVE)], [GATHER(receives_from=2)], [0.0, 0.0], [146.7, 146.7]),
    ],
)
def test_a_message_is_received_after_it_was_sent(rank_0, rank_1, late_us, step_us):
    ranks = [one.schedule for one in distinct_schedules([graph(*rank_0), graph(*rank_1)], [0, 1])]
    assert [1000 * one.step_ms for one in (ranks * 2)[:2]] == pytest.approx(step_us, abs=0.1)
    received = [one for rank in ranks for one in rank.issued if one.sender is not None]
    assert [one.late_us for one in received] == pytest.approx(late_us, abs=0.1)


@pytest.mark.parametrize("other", [None, StepGraph(problem="none"), graph(PRODUCT())])
def test_a_rank_without_a_graph_of_collectives_leaves_the_launch_without_schedules(other):
    assert distinct_schedules([fsdp_step(), other], [0, 1]) == []


@pytest.mark.parametrize("name", MACHINES)
def test_a_network_is_slower_than_a_host_on_each_machine(name):
    within, between = (play(graph(gather(group_size=size)()), MACHINES[name]) for size in (8, 16))
    assert between.step_ms > within.step_ms
