from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.commit_search import (
    CONFIDENCE,
    MIN_PAIRS,
    CommitSearch,
    NextLaunch,
    Probe,
    SearchEnd,
    SearchOutcome,
)
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.bisection import LOOKS
from pytest_aorta.verdict.statistics.variance import VarianceComponents
from tests.unit.builders import default_priors, make_facts, replace, with_p50
from tests.unit.simulated import at_most

Launch = Callable[[int], LaunchFacts]
EXACT = {"weight_hash": Tolerance(None)}


def comparison(only: list[str], tolerance: float = 0.01, max_pairs: int = 12) -> PairedComparison:
    return PairedComparison("case", {"step_time_p50": Tolerance(tolerance)}, default_priors, only, max_pairs, "good")


def run(search: CommitSearch, launch: Launch, broken: frozenset[int] = frozenset()) -> tuple[SearchEnd, Counter[int]]:
    """Search, and return the end and the number of launches of each commit."""
    launches: Counter[int] = Counter()
    while isinstance(step := search.next(), NextLaunch):
        launches.update(commit for commit in (step.commit, step.before) if commit)
        assert launches.total() < 500
        if step.commit in broken:
            search.skip(step.commit, "does not start")
            continue
        search.add(probe(step, launch))
    return step, launches


def probe(step: NextLaunch, launch: Launch) -> Probe:
    """Make the launches that a search asks for."""
    return Probe(step.commit, launch(step.commit), launch(step.before or 0) if step.paired else None, step.before)


def timed(planted: int, change: float = 0.02, noise: float = 0.002, seed: int = 1) -> Launch:
    rng = random.Random(seed)
    return lambda commit: with_p50(make_facts(), rng.gauss(10, 10 * noise) * (1 + (change if commit >= planted else 0)))


def disturbed(planted: int, share: float, seed: int) -> Launch:
    """Return launches of which a ``share`` is 3% slower than the rest, as on a machine that other jobs use."""
    rng = random.Random(seed)

    def launch(commit: int) -> LaunchFacts:
        step_ms = rng.gauss(10, 0.02) * (1.03 if rng.random() < share else 1)
        return with_p50(make_facts(), step_ms * (1.02 if commit >= planted else 1))

    return launch


def hashed(planted: int) -> Launch:
    return lambda commit: make_facts(weight_hashes={"4": ("b" if commit >= planted else "a") * 16})


@given(st.integers(1, 120), st.data())
@settings(max_examples=30, deadline=None)
def test_changed_bits_are_found_wherever_they_are(num_commits, data):
    planted = data.draw(st.integers(1, num_commits))
    end, launches = run(CommitSearch(num_commits, comparison(["weight_hash"])), hashed(planted))
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (planted,))
    # Two pairs of the ends, a bisection, and a further launch of the commit and of the one before.
    assert launches.total() <= 2 + (num_commits - 1).bit_length() + 2
    assert all(launches[commit] >= 2 for commit in (planted - 1, planted) if commit > 0)


@pytest.mark.parametrize("planted", [1, 13, 32])
def test_slowdown_is_found_with_its_size_and_probability(planted):
    end, launches = run(CommitSearch(32, comparison(["step_time_p50"])), timed(planted))
    assert (end.outcome, end.suspects, end.metric) == (SearchOutcome.FOUND, (planted,), "step_time_p50")
    assert end.probability >= CONFIDENCE
    assert end.low < 0.02 < end.high
    beside = [commit for commit in (planted - 1, planted) if commit > 0]
    assert all(launches[commit] >= MIN_PAIRS for commit in beside)
    assert {row.commit: row.launches for row in end.probed} == launches


# The posterior alone names another commit after the launches of each of these seeds.
@pytest.mark.parametrize(("share", "seed"), [(0.2, 56), (0.3, 22), (0.3, 41)])
def test_commit_is_not_named_on_launches_in_two_groups_unless_pairs_confirm_it(share, seed):
    end, launches = run(CommitSearch(16, comparison(["step_time_p50"])), disturbed(9, share, seed))
    if end.outcome is SearchOutcome.FOUND:
        assert end.suspects == (9,)
    else:
        assert "20 pairs of the likeliest commit and the one before did not confirm it" in end.reason
        assert launches.total() > 2 * max(LOOKS)


def test_named_commit_is_confirmed_in_pairs_with_the_commit_before():
    search, launch, steps = CommitSearch(16, comparison(["step_time_p50"])), timed(9), []
    while isinstance(step := search.next(), NextLaunch):
        steps.append(step)
        search.add(probe(step, launch))
    confirming = [(one.commit, one.before) for one in steps if one.before is not None]
    assert confirming == [(9, 8)] * min(LOOKS)
    assert confirming == [(one.commit, one.before) for one in steps[-len(confirming) :]]
    assert step.num_confirming == len(confirming)


def test_commit_before_that_stops_starting_becomes_a_suspect():
    search, launch = CommitSearch(16, comparison(["step_time_p50"])), timed(9)
    while isinstance(step := search.next(), NextLaunch):
        if step.before == 8:
            search.skip(8, "does not start any more")
        else:
            search.add(probe(step, launch))
    assert (step.outcome, step.suspects) == (SearchOutcome.FOUND, (8, 9))
    assert step.num_confirming == min(LOOKS)


def test_commit_before_that_lost_the_metric_is_skipped_with_this_reason():
    search, launch = CommitSearch(16, comparison(["peak_memory_bytes"])), timed(9, change=0.2)

    def measured(commit: int) -> LaunchFacts:
        return make_facts(metrics={"peak_memory_bytes": launch(commit).step_time_ms["p50"] * 1e9})

    while isinstance(step := search.next(), NextLaunch):
        made = probe(step, measured)
        search.add(replace(made, reference=make_facts(metrics={})) if step.before == 8 else made)
    assert (step.outcome, step.suspects) == (SearchOutcome.FOUND, (8, 9))
    assert [row.detail for row in step.probed if row.commit == 8] == ["has no peak_memory_bytes"]


def test_speedup_is_found_too():
    end, _ = run(CommitSearch(16, comparison(["step_time_p50"])), timed(5, change=-0.03))
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (5,))
    assert end.change == pytest.approx(-0.03, abs=0.005)


def test_equal_ends_are_absent_after_pairs_of_the_ends_alone():
    end, launches = run(CommitSearch(16, comparison(["step_time_p50", "weight_hash"])), timed(17))
    assert end.outcome is SearchOutcome.ABSENT
    assert set(launches) == {16}


def test_ends_that_differ_by_chance_are_absent_after_further_pairs():
    rng = random.Random(5)
    slow_pairs = 4
    launches: Counter[int] = Counter()

    def launch(commit: int) -> LaunchFacts:
        launches[commit] += 1
        is_disturbed = commit == 8 and launches[8] <= slow_pairs
        return with_p50(make_facts(), rng.gauss(10, 0.02) * (1.04 if is_disturbed else 1))

    end, _ = run(CommitSearch(8, comparison(["step_time_p50"])), launch)
    assert end.outcome is not SearchOutcome.FOUND


def test_noise_that_hides_the_change_is_undecided():
    end, launches = run(CommitSearch(8, comparison(["step_time_p50"])), timed(3, noise=0.05, seed=2))
    assert end.outcome is SearchOutcome.UNDECIDED
    assert "too noisy to distinguish the ends in 12 pairs" in end.reason
    assert set(launches) == {8}


def test_search_ends_undecided_at_its_limit_with_the_likeliest_commit():
    search = CommitSearch(64, comparison(["step_time_p50"]), max_probes=6)
    end, launches = run(search, timed(20))
    assert end.outcome is SearchOutcome.UNDECIDED
    assert launches.total() == 6
    assert 0 < end.probability < CONFIDENCE


@given(st.integers(2, 60), st.data())
@settings(max_examples=30, deadline=None)
def test_skipped_commits_are_suspects_with_the_next_commit_that_starts(num_commits, data):
    planted = data.draw(st.integers(1, num_commits))
    broken = data.draw(st.frozensets(st.integers(1, num_commits - 1)))
    end, launches = run(CommitSearch(num_commits, comparison(["weight_hash"])), hashed(planted), broken)
    assert end.outcome is SearchOutcome.FOUND
    assert planted in end.suspects
    assert set(end.suspects[:-1]) <= broken
    assert all(launches[commit] <= 1 for commit in broken)
    assert {row.commit for row in end.probed if row.detail == "does not start"} == broken & set(launches)


def test_bits_that_differ_between_launches_of_the_good_commit_are_undecided():
    rng = random.Random(6)
    end, _ = run(
        CommitSearch(8, comparison(["weight_hash"])),
        lambda commit: make_facts(weight_hashes={"4": f"{rng.getrandbits(64):016x}"}),
    )
    assert end.outcome is SearchOutcome.UNDECIDED
    assert "weight_hash differs between launches of one commit" in end.reason


def test_commit_is_rarely_named_if_later_commits_have_its_bits_in_nine_of_ten_launches():
    wrong = 0
    for seed in range(300):
        rng = random.Random(seed)

        def launch(commit: int, rng: random.Random = rng) -> LaunchFacts:
            return hashed(5 if rng.random() < 0.9 else 99)(commit)

        end, _ = run(CommitSearch(16, comparison(["weight_hash"])), launch)
        wrong += end.outcome is SearchOutcome.FOUND and end.suspects != (5,)
    # One launch of each commit would name a wrong one in 17% of searches.
    assert wrong < at_most(0.03, 300)


def test_bits_that_differ_between_launches_of_a_commit_in_between_are_undecided():
    numbers = iter(range(100))

    def launch(commit: int) -> LaunchFacts:
        return hashed(5 if commit != 5 or next(numbers) == 0 else 99)(commit)

    end, launches = run(CommitSearch(16, comparison(["weight_hash"])), launch)
    assert end.outcome is SearchOutcome.UNDECIDED
    assert "weight_hash differs between launches of one commit" in end.reason
    assert launches[5] == 2


def test_metric_that_the_bad_commit_lost_is_searched_as_bits():
    launch = hashed(0)
    end, _ = run(
        CommitSearch(16, comparison(["weight_hash"])),
        lambda commit: launch(commit).replace(weight_hashes={}) if commit >= 6 else launch(commit),
    )
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (6,))


def test_commit_without_the_noisy_metric_is_skipped_with_this_reason():
    with_memory = timed(9, change=0.2)

    def launch(commit: int) -> LaunchFacts:
        memory = with_memory(commit).step_time_ms["p50"] * 1e9
        return make_facts(metrics={} if commit == 8 else {"peak_memory_bytes": memory})

    end, _ = run(CommitSearch(16, comparison(["peak_memory_bytes"])), launch)
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (8, 9))
    assert [row.detail for row in end.probed if row.commit == 8] == ["has no peak_memory_bytes"]


@pytest.mark.parametrize("metrics", [["overlap_ratio"], ["overlap_ratio", "weight_hash"]])
def test_metric_that_no_launch_has_is_undecided(metrics):
    end, launches = run(CommitSearch(16, comparison(metrics)), hashed(17))
    assert end.outcome is SearchOutcome.UNDECIDED
    assert "overlap_ratio: neither end has it" in end.reason
    assert set(launches) == {16}


def test_bits_are_searched_before_times_and_the_note_names_the_times():
    slow = timed(4, change=0.2)
    end, _ = run(
        CommitSearch(8, comparison(["step_time_p50", "weight_hash"])),
        lambda commit: slow(commit).replace(weight_hashes=hashed(4)(commit).weight_hashes),
    )
    assert (end.metric, end.suspects) == ("weight_hash", (4,))


def test_commit_with_a_part_of_the_change_is_remarked():
    rng = random.Random(7)

    def launch(commit: int) -> LaunchFacts:
        change = 0.0 if commit < 6 else 0.03 if commit < 9 else 0.06
        return with_p50(make_facts(), rng.gauss(10, 0.004) * (1 + change))

    end, _ = run(CommitSearch(16, comparison(["step_time_p50"])), launch)
    assert any("of the change: more than one commit changed the metric" in row.detail for row in end.probed)


def test_same_launches_lead_to_the_same_end():
    launch, logged = timed(13), []
    search = CommitSearch(32, comparison(["step_time_p50"]))
    while isinstance(step := search.next(), NextLaunch):
        logged.append(probe(step, launch))
        search.add(logged[-1])
    again = CommitSearch(32, comparison(["step_time_p50"]))
    for number, made in enumerate(logged):
        assert again.next() == NextLaunch(made.commit, True, number % 2 == 1, made.before)
        again.add(made)
    assert again.next() == step


def test_order_of_the_sides_alternates():
    launch, orders = timed(13), []
    search = CommitSearch(32, comparison(["step_time_p50"]))
    while isinstance(step := search.next(), NextLaunch):
        orders.append(step.candidate_first)
        search.add(probe(step, launch))
    assert orders == [number % 2 == 1 for number in range(len(orders))]


@pytest.mark.parametrize("is_lost", [True, False])
def test_metric_with_noise_that_a_commit_lost_or_gained_is_searched_by_its_presence(is_lost):
    rng = random.Random(8)

    def launch(commit: int) -> LaunchFacts:
        memory = {"peak_memory_bytes": rng.gauss(1e9, 1e5)}
        return make_facts(metrics=memory if (commit < 6) is is_lost else {})

    end, launches = run(CommitSearch(16, comparison(["peak_memory_bytes"])), launch)
    assert (end.outcome, end.suspects, end.probability) == (SearchOutcome.FOUND, (6,), pytest.approx(1))
    assert launches.total() <= 2 + 4 + 2


def test_metric_that_only_some_launches_of_a_commit_lack_is_undecided():
    numbers = iter(range(100))

    def launch(commit: int) -> LaunchFacts:
        lacks = commit == 8 and next(numbers) == 0
        return make_facts(metrics={} if lacks else {"peak_memory_bytes": 1e9})

    end, _ = run(CommitSearch(8, comparison(["peak_memory_bytes"])), launch)
    assert end.outcome is SearchOutcome.UNDECIDED
    assert end.reason == "peak_memory_bytes is missing in some launches of one commit, but not in all of them"


def test_metric_without_noise_in_all_baselines_of_the_platform_is_searched():
    never = VarianceComponents.of(0.0, 0.0, 2.0)
    search = CommitSearch(8, PairedComparison("case", {}, lambda _: never, ["peak_memory_bytes"], 12, "good"))
    end, _ = run(search, lambda commit: make_facts(metrics={"peak_memory_bytes": 1.1e9 if commit >= 5 else 1e9}))
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (5,))
    assert end.change == pytest.approx(0.1)


def test_commit_whose_host_was_late_once_is_launched_again():
    rng = random.Random(9)

    def launch(commit: int) -> LaunchFacts:
        overlap = rng.gauss(0.7 if commit >= 9 else 0.9, 0.003)
        return make_facts(metrics={"overlap_ratio" if rng.random() > 0.2 else "overlap_ratio_as_run": overlap})

    end, _ = run(CommitSearch(16, comparison(["overlap_ratio"])), launch)
    assert (end.outcome, end.suspects) == (SearchOutcome.FOUND, (9,))
    assert not any(row.detail for row in end.probed)


def test_time_without_a_tolerance_asks_for_one():
    slow = timed(5)

    def launch(commit: int) -> LaunchFacts:
        facts = slow(commit)
        return facts.replace(step_time_ms=facts.step_time_ms | {"mean": facts.step_time_ms["p50"]})

    end, launches = run(CommitSearch(8, comparison(["step_time_mean"])), launch)
    assert end.outcome is SearchOutcome.UNDECIDED
    assert end.reason == (
        "step_time_mean varies between launches of one commit, but has to be equal bit for bit; give a tolerance, such "
        "as --tolerance step_time_mean=5%"
    )
    assert launches.total() == 2
