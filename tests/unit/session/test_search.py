from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.search import SearchLog, SearchRequest, Skip, give
from pytest_aorta.verdict.commit_search import CommitSearch, NextLaunch, Probe, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from tests.unit.builders import default_priors, make_facts, with_p50

COMMITS = tuple(f"{number:040x}" for number in range(9))
REQUEST = SearchRequest(COMMITS, ("test_a.py::test_one", "-x"), (("make", "all"),), "/there", {"step_time_p50": "1%"})
CASE = "test_a.py::test_one::toy"


def search() -> CommitSearch:
    return CommitSearch(8, PairedComparison(CASE, {}, default_priors, ["weight_hash"], 12, "good"))


def probe(commit: int, *, paired: bool, planted: int = 4) -> Probe:
    good, bad = make_facts(weight_hashes={"4": "a" * 16}), make_facts(weight_hashes={"4": "b" * 16})
    return Probe(commit, bad if commit >= planted else good, good if paired else None)


@pytest.fixture
def log(tmp_path: Path) -> SearchLog:
    """The log of a search that has ended, with a commit that does not start."""
    log, searched = SearchLog.create(tmp_path / "there" / "log.jsonl", REQUEST), search()
    while isinstance(step := searched.next(), NextLaunch):
        event = Skip(4, "does not start") if step.commit == 4 else probe(step.commit, paired=step.paired)
        give(searched, event)
        log.add(CASE, event)
    log.add(CASE, step)
    return log


def test_log_is_read_as_it_was_written(log):
    again = SearchLog.read(log.path)
    assert again.request == REQUEST
    assert again.events(CASE) == log.events(CASE)
    assert {type(event) for event in again.events(CASE)} == {Probe, Skip}
    assert again.ends() == log.ends()
    assert (again.ends()[CASE].outcome, again.ends()[CASE].suspects) == (SearchOutcome.FOUND, (4, 5))
    assert again.events("another case") == []


def test_replayed_search_has_the_same_end(log):
    searched = search()
    assert SearchLog.read(log.path).replay(CASE, searched)
    end = searched.next()
    assert isinstance(end, SearchEnd)
    assert end.suspects == (4, 5)
    assert not log.replay("another case", search())


@pytest.fixture
def timed_log(tmp_path: Path) -> SearchLog:
    """The log of a search of step times that has ended, with pairs that confirm the commit."""
    log, searched, rng = SearchLog.create(tmp_path / "log.jsonl", REQUEST), timed_search(), random.Random(1)

    def launch(commit: int) -> LaunchFacts:
        return with_p50(make_facts(), rng.gauss(10, 0.01) * (1.2 if commit >= 4 else 1))

    while isinstance(step := searched.next(), NextLaunch):
        event = Probe(step.commit, launch(step.commit), launch(step.before or 0), step.before)
        give(searched, event)
        log.add(CASE, event)
    log.add(CASE, step)
    return log


def timed_search() -> CommitSearch:
    return CommitSearch(8, PairedComparison(CASE, {}, default_priors, ["step_time_p50"], 12, "good"))


def test_pairs_that_confirm_a_commit_are_read_as_they_were_written_and_replayed(timed_log):
    again = SearchLog.read(timed_log.path)
    assert again.events(CASE) == timed_log.events(CASE)
    assert [event.before for event in again.events(CASE)][-5:] == [3] * 5
    assert (again.ends()[CASE].suspects, again.ends()[CASE].num_confirming) == ((4,), 5)
    searched = timed_search()
    assert again.replay(CASE, searched)
    end = searched.next()
    assert isinstance(end, SearchEnd)
    assert (end.suspects, end.num_confirming) == ((4,), 5)


@pytest.mark.parametrize("before", [2, 40, None])
def test_pair_with_another_commit_than_the_search_asks_for_is_refused(timed_log, before):
    lines = timed_log.path.read_text().splitlines()
    timed_log.path.write_text("\n".join([*lines[:-2], changed(lines[-2], before=before), lines[-1]]))
    with pytest.raises(SpecError, match="is not what the search asks for"):
        SearchLog.read(timed_log.path).replay(CASE, timed_search())


def test_log_of_another_search_is_refused(log):
    lines = log.path.read_text().splitlines()
    log.path.write_text("\n".join([lines[0], *lines[3:]]))
    with pytest.raises(SpecError, match="is not what the search asks for; the test, the baselines or pytest-aorta"):
        SearchLog.read(log.path).replay(CASE, search())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-40]], "line 10: not valid JSON"),
        (lambda lines: ["", *lines], "line 1: empty"),
        (lambda lines: [], "line 1: empty"),
        (lambda lines: lines[1:], r"line 1: \$: unknown key 'case'"),
        (lambda lines: [lines[0], *lines], r"line 2: \$: unknown key 'commits'"),
        (lambda lines: [lines[0], "[]"], "line 2: .*Expected `object`"),
        (lambda lines: [lines[0], changed(lines[1], kind="prob")], "line 2: .*Invalid value 'prob'"),
        (lambda lines: [lines[0], changed(lines[1], candidate={})], "line 2: .*missing required field"),
        (lambda lines: [lines[0], changed(lines[1], commit="f" * 40)], "line 2: .*Expected `int`"),
        (lambda lines: [lines[0].replace('"schema_version":2', '"schema_version":1')], r"\$.schema_version: got 1"),
    ],
)
def test_malformed_line_is_an_error_that_names_it(log, damage: Callable[[list[str]], list[str]], message: str):
    log.path.write_text("\n".join(damage(log.path.read_text().splitlines())))
    with pytest.raises(SpecError, match=message) as raised:
        SearchLog.read(log.path)
    assert str(log.path) in str(raised.value)
    assert "delete the folder to search from the beginning" in str(raised.value)


def test_absent_log_is_an_error(tmp_path):
    with pytest.raises(SpecError, match="can't be read"):
        SearchLog.read(tmp_path / "log.jsonl")


def changed(line: str, **values: object) -> str:
    """Return a line whose event has other values."""
    document = json.loads(line)
    return json.dumps(document | {"event": document["event"] | values})
