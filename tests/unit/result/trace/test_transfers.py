"""Transfers of collectives, apart from the waits for late ranks."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.profiled_steps import MAX_CALLS, CollectiveCalls, collective_facts, waits_ms
from tests.unit.builders import each_of


def calls(*ms: float, kind="all_gather", group="0 [0, 1]", size=2, num_bytes=1 << 20):
    return CollectiveCalls(kind, group, size, num_bytes, list(ms))


def test_rank_that_arrives_last_waits_for_nothing_and_its_duration_is_the_transfer():
    found = collective_facts([[calls(5.0, 5.5)], [calls(1.0, 1.5)]], 2)["all_gather"]
    assert (found.transfer_ms, found.wait_ms, found.straggler, found.calls) == (1.25, [4.0, 0.0], 1, 1.0)
    assert found.peers_wait_ms == 4.0
    assert collective_facts([[calls(5.0, group="", size=None)]], 1)["all_gather"].peers_wait_ms == 0


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4), ("all_to_all", 3 / 4), ("broadcast", 1)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind, factor):
    entry = calls(2.0, kind=kind, group="0", size=4, num_bytes=8_000_000)
    found = collective_facts([[entry]] * 4, 1)[kind]
    assert found.bus_bytes == pytest.approx(factor * 8e6)
    assert found.bus_gb_per_s == pytest.approx(factor * 4)


def test_sizes_that_are_unknown_give_no_bandwidth():
    known, unknown = calls(1.0), calls(1.0, num_bytes=None)
    found = collective_facts([[known, unknown]] * 2, 1)["all_gather"]
    assert (found.bus_gb_per_s, found.transfer_ms) == (None, 2.0)


def test_groups_are_matched_each_for_itself():
    near, far = calls(4.0, group="1 [0, 1]"), calls(9.0, group="2 [2, 3]")
    late = calls(1.0, group="1 [0, 1]")
    found = collective_facts([[near], [late], [far], [far]], 1)["all_gather"]
    assert found.wait_ms == [3.0, 0.0, 0.0, 0.0]
    assert found.transfer_ms == pytest.approx((1 + 1 + 9 + 9) / 4)


@pytest.mark.parametrize(
    "ranks", [[[calls(1.0)], [calls(1.0, 2.0)]], [[calls(1.0)], []], [[calls(1.0, group="", size=None)], []]]
)
def test_calls_that_do_not_match_are_left_out_and_others_stay(ranks):
    reduced = calls(1.0, kind="all_reduce")
    assert set(collective_facts([[*rank, reduced] for rank in ranks], 1)) == {"all_reduce"}


@pytest.mark.parametrize("others", [0, 23])
def test_waits_of_many_ranks_are_kept_as_those_of_the_straggler_and_its_peers(others):
    ranks = [[calls(1.0 + rank, group="0", size=9)] for rank in range(9)]
    found = collective_facts([*ranks, *[[]] * others], 1)["all_gather"]
    assert (found.wait_ms, found.straggler) == ([0.0, 4.5], 0)


def test_ranks_that_never_call_a_collective_are_no_peers_of_its_straggler():
    """Reduce tied weights over the first and the last stage of a pipeline."""
    ranks = [[calls(40.0, group="tied [0, 7]")], *[[]] * 6, [calls(1.0, group="tied [0, 7]")]]
    found = collective_facts(ranks, 1)["all_gather"]
    assert (found.wait_ms, found.peers_wait_ms, found.straggler) == ([39.0, 0.0], 39.0, 7)


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=40))
def test_wait_of_the_peers_is_their_median_for_any_number_of_ranks(ms):
    facts = collective_facts([[calls(duration, group="0", size=len(ms))] for duration in ms], 1)["all_gather"]
    waits = sorted(duration - min(ms) for duration in ms)
    assert (facts.straggler_wait_ms, facts.peers_wait_ms) == (0.0, pytest.approx(median(waits[1:])))


def test_wait_of_each_call_is_its_duration_beyond_the_shortest_of_the_group():
    early, late = calls(5.0, 1.0), calls(1.5, 4.0)
    far = calls(9.0, 9.0, group="1 [2, 3]")
    ranks = [[early], [late], [far], [far]]
    assert waits_ms(ranks, 0) == {early.key: [3.5, 0.0]}
    assert waits_ms(ranks, 1) == {late.key: [0.0, 3.0]}
    assert waits_ms(ranks, 2) == {far.key: [0.0, 0.0]}


WITHOUT_WAITS = {
    "count": (calls(5.0), calls(1.0, 1.0)),
    "bytes": (calls(5.0), calls(1.0, num_bytes=4)),
    "absent rank": (calls(5.0, size=3), calls(1.0, size=3)),
    "no group": (calls(5.0, group="", size=2), calls(1.0, group="", size=2)),
    "no size": (calls(5.0, size=None), calls(1.0, size=None)),
    "send": (calls(5.0, kind="send_recv"), calls(1.0, kind="send_recv")),
    "broadcast": (calls(5.0, kind="broadcast"), calls(1.0, kind="broadcast")),
}


@each_of("own, peer", WITHOUT_WAITS)
def test_calls_that_do_not_match_or_need_not_wait_have_no_waits(own, peer):
    assert waits_ms([[own], [peer]], 0) == {}


def exchange(*ms: float, num_bytes):
    return calls(*ms, kind="all_to_all", group="ep [0, 1]", num_bytes=num_bytes)


def test_all_to_all_calls_are_paired_by_their_order_whatever_each_rank_sends():
    ranks = [[exchange(20.0, 5.0, num_bytes=1000)], [exchange(5.0, 5.5, num_bytes=2000)]]
    assert [waits_ms(ranks, rank) for rank in (0, 1)] == [{ranks[0][0].key: [15.0, 0.0]}, {ranks[1][0].key: [0.0, 0.5]}]
    found = collective_facts(ranks, 1)["all_to_all"]
    assert (found.transfer_ms, found.wait_ms, found.straggler) == (10.0, [15.0, 0.5], 1)
    # Half of the mean size goes over the bus between two ranks.
    assert found.bus_bytes == 2 * 1500 / 2


@given(st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.01, 1e3)), min_size=1, max_size=20))
def test_waits_and_transfers_add_up_to_the_durations(durations):
    ranks = [[calls(*own)] for own in zip(*durations, strict=True)]
    facts = collective_facts(ranks, 1)["all_gather"]
    for rank, entries in enumerate(ranks):
        (waits,) = waits_ms(ranks, rank).values()
        assert min(waits) >= 0
        assert sum(waits) == pytest.approx(facts.wait_ms[rank], abs=1e-6)
        assert sum(entries[0].ms) - sum(waits) == pytest.approx(facts.transfer_ms)


def test_more_calls_than_a_result_keeps_give_no_figures_since_steps_would_lack_calls():
    most = [[calls(*[1.0 + rank] * MAX_CALLS)] for rank in range(2)]
    assert collective_facts(most, 8) == {}
    assert waits_ms(most, 1) == {}
    fewer = [[calls(*[1.0 + rank] * (MAX_CALLS - 1))] for rank in range(2)]
    assert collective_facts(fewer, 8)["all_gather"].wait_ms == [0.0, (MAX_CALLS - 1) / 8]
