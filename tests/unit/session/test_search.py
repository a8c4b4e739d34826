"""Searches of made-up launches for what changed a metric."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError
from pytest_aorta.plan.reference import Reference
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.axes import Axis, Over, Point
from pytest_aorta.session.search import Finding, Search, SearchLog
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Origin, Tolerance, parse_tolerances
from tests.unit.builders import each_of, make_facts, with_p50

NOISE = random.Random(1)


class Line(Axis):
    """Eight commits, named c1 to c8, after c0."""

    over, is_ordered = Over.COMMITS, True
    changes = tuple(f"c{number}" for number in range(1, 9))

    def __init__(self) -> None:
        """Need no repository."""

    def name(self, point: Point) -> str:
        return f"c{len(point)}"

    short = name

    def _open(self, point: Point) -> Reference:
        raise NotImplementedError


class Commits:
    """A search over :class:`Line`."""

    axis = Line()
    finding = Finding()

    def __init__(self) -> None:
        self.own_log = SearchLog(str(NOISE.random()))

    def log(self, comparison: PairedComparison, metric: str) -> SearchLog:
        return self.own_log

    def end_failed(self, point: Point, error: AortaError) -> AortaError:
        return AortaError(f"end {len(point)}: {error}")


def make_search(
    launch: Callable[[int], LaunchFacts],
    *metrics: str,
    marked: dict[str, Tolerance] | None = None,
    commits: Any = None,
    say: Callable[[str], object] = lambda _: None,
) -> Search:
    comparison = PairedComparison("case", marked or {}, metrics, 12, "c0")
    return Search(commits or Commits(), comparison, launch(0), lambda point: launch(len(point)), say)


def search(
    metric: str, launch: Callable[[int], LaunchFacts], marked: dict[str, Tolerance] | None = None
) -> tuple[str, Commits]:
    """Return the text of a search's end, and the commits."""
    commits = Commits()
    with pytest.raises(ComparisonFailed) as ended:
        make_search(launch, metric, marked=marked, commits=commits).run()
    return str(ended.value), commits


def timed(ms: float, deviation: float = 0.001) -> LaunchFacts:
    return with_p50(make_facts(), ms * NOISE.gauss(1, deviation))


@each_of("after_ms", {"slower": 13.0, "faster": 7.0})
def test_commit_is_named_whichever_way_the_metric_changed(after_ms):
    text, commits = search("step_time_p50", lambda number: timed(after_ms if number >= 6 else 10.0))
    assert text.startswith("case: found: c6\n")
    assert "; A/B with c5" in text
    assert commits.finding.changes == ("c6",)


def test_commit_that_lost_a_metric_is_named():
    text, _ = search("final_loss", lambda number: make_facts(final_loss=None if number >= 3 else 2.0))
    assert text.startswith("case: found: c3\n")


def test_change_in_small_parts_names_a_likeliest_commit_only():
    text, commits = search("step_time_p50", lambda number: timed(10.0 * 1.02**number))
    assert "undecided: likeliest is c" in text
    assert not commits.finding.changes


def test_ends_that_noise_hides_are_undecided():
    text, _ = search("step_time_p50", lambda number: timed(10.6 if number else 10.0, 0.1))
    assert "undecided: the ends can't be told apart" in text


@pytest.mark.parametrize("only", [["weight_hash", "num_parameters"], ["weight_hash"]])
def test_metric_that_the_ends_can_not_share_is_named_beside_those_that_do_not_differ(only):
    def launch(number: int) -> LaunchFacts:
        facts = make_facts(metrics={"num_parameters": 1.0})
        return facts.replace(environment=facts.environment | {"torch": f"2.1{number}.0"})

    said: list[str] = []
    search = make_search(launch, *only, say=said.append)
    if only == ["weight_hash"]:
        with pytest.raises(
            ComparisonFailed, match=r"undecided: the ends can't be told apart\n  Not applicable: weight_h"
        ):
            search.run()
    else:
        assert search.run().rows
        assert "not found: the ends do not differ; Not applicable: weight_hash" in said[-1]


def test_metric_that_can_not_be_compared_is_not_searched_beside_one_that_changed():
    def launch(number: int) -> LaunchFacts:
        facts = make_facts(metrics={"num_parameters": 1.0 + (number >= 5)})
        return facts.replace(environment=facts.environment | {"bitwise_reproducible": False})

    marked = {"weight_hash": Tolerance(None, origin=Origin.MARKER), "num_parameters": Tolerance(None)}
    with pytest.raises(ComparisonFailed, match="found: c5"):
        make_search(launch, *marked, marked=marked).run()


def test_end_that_stops_to_start_is_an_error_and_no_skipped_commit():
    started: list[int] = []

    def launch(number: int) -> LaunchFacts:
        started.append(number)
        if number == 8 and len(started) > 2:
            raise LaunchError("boom")
        return make_facts(weight_hashes={"4": "ab"[number >= 4] * 16})

    failing = make_search(launch, "step_time_p50")
    with pytest.raises(AortaError, match="end 8: boom"):
        failing.run()


def test_interrupted_search_goes_on_after_the_points_that_it_knows(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commits, said = Commits(), []

    def launch(number: int) -> LaunchFacts:
        said.append(f"launched c{number}")
        if said.count("launched c6") == 1 and said[-1] == "launched c6":
            raise KeyboardInterrupt
        return make_facts(metrics={"num_parameters": 2.0 if number >= 7 else 1.0})

    def run() -> None:
        make_search(launch, "num_parameters", commits=commits, say=said.append).run()

    with pytest.raises(KeyboardInterrupt):
        run()
    said.append("again")
    with pytest.raises(ComparisonFailed, match="found: c7"):
        run()
    again = said[said.index("again") :]
    assert any(line.startswith("an interrupted search goes on after 1 point; ") for line in again)
    assert "launched c4" in said
    assert "launched c4" not in again
    assert not commits.own_log.file.exists()


def test_commit_that_changed_a_noisy_metric_of_a_script_is_named():
    marked = parse_tolerances({"reward": "-5%"}, "tolerance")
    text, _ = search(
        "reward",
        lambda number: make_facts(metrics={"reward": (7.0 if number >= 4 else 10.0) * NOISE.gauss(1, 0.01)}),
        marked,
    )
    assert text.startswith("case: found: c4\n")
