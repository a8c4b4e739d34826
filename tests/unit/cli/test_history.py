"""``aorta history``: versions in order, and change points."""

import random
import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.verdict.attribution import PLANTS, named
from pytest_aorta.cli.history import CONFIRMING_VERSIONS, case_histories, told_changes
from pytest_aorta.cli.history import find_changes as changes_of
from pytest_aorta.cli.main import main
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.metrics import METRICS
from tests.unit.sample_history import (
    commit_of,
    entries_of,
    make_entry,
    make_launch,
    write_history,
)

NOISE = random.Random(0)
STEADY = [NOISE.gauss(10, 0.015) for _ in range(20)]
SLOWER = [NOISE.gauss(10.5, 0.015) for _ in range(8)]
HASH = "weight_hash"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def otava():
    return pytest.importorskip("otava", reason="needs pytest-aorta[history]")


def one(entries):
    (history,) = case_histories(entries)
    return history


def find_changes(history):
    return [change for metric in history.points for change in changes_of(history, metric)]


def with_values(number, values, **changes):
    return make_entry(number, launches=(make_launch(values, number=number, **changes),))


def hashes(*texts):
    return [with_values(number, {HASH: text}) for number, text in enumerate(texts)]


# versions


def test_uncommitted_changes_of_two_runs_are_two_versions():
    dirty = [with_values(0, {"step_time_p50": 10.0}, dirty=True) for _ in range(2)]
    history = one([dirty[0], dirty[1].replace(run="20260105T030000.000000Z-ffffffff"), make_entry(0)])
    found = [launches[0].provenance for launches in history.versions]
    assert [(one.commit, one.dirty) for one in found] == [
        (commit_of(0), True),
        (commit_of(0), True),
        (commit_of(0), False),
    ]


def test_launches_of_a_reference_or_under_a_profiler_are_left_out():
    launches = [make_launch(), make_launch(side=Side.REFERENCE), make_launch(profiler="coverage")]
    assert list(map(len, one([make_entry(launches=tuple(launches))]).versions)) == [1]


# change points


@pytest.mark.parametrize(("metric", "verdict"), [("step_time_p50", "worse"), ("tokens_per_s", "better")])
def test_change_is_found_at_its_commit_and_judged_by_the_metrics_direction(otava, metric, verdict):
    entries = [with_values(number, {metric: value}) for number, value in enumerate(STEADY + SLOWER)]
    (change,) = find_changes(one(entries))
    assert (change.metric, change.index, change.verdict) == (metric, 20, verdict)
    assert change.last == 19
    assert float(change.cells[6].strip("%")) == pytest.approx(5, abs=0.3)


def new_changes(history):
    return [change for change, is_new in told_changes(history) if is_new]


def test_change_is_reported_once_as_soon_as_it_is_confirmed(otava):
    values = STEADY + SLOWER
    reported = [number for number in range(10, len(values) + 1) if new_changes(one(entries_of(values[:number])))]
    assert reported == [20 + CONFIRMING_VERSIONS]


@pytest.fixture
def no_otava(monkeypatch):
    monkeypatch.setitem(sys.modules, "otava.analysis", None)


def test_other_weights_are_a_change_at_once_and_need_no_otava(no_otava):
    (change,) = new_changes(one(hashes("a" * 16, "a" * 16, "b" * 16)))
    assert (change.metric, change.index, change.verdict, change.cells[6]) == (HASH, 2, "changed", "-")
    assert new_changes(one(hashes("a" * 16, "b" * 16, "b" * 16))) == []


def test_version_without_the_metric_lies_between_the_two_sides_of_a_change():
    entries = hashes("a" * 16, "b" * 16, "b" * 16)
    entries[1] = with_values(1, {"num_parameters": 1.0})
    (change,) = find_changes(one(entries))
    assert (change.last, change.index) == (0, 2)


@given(st.lists(st.floats(-1e100, 1e100), max_size=12), st.sampled_from(sorted(METRICS)))
@example([1.0, 1e-308, 0.0], "step_time_p50")
@example([1e-320] * 4 + [1e100] * 4, "step_time_p50")
def test_any_values_have_change_points_within_the_history(values, metric):
    pytest.importorskip("otava", reason="needs pytest-aorta[history]")
    entries = [with_values(number, {metric: value}) for number, value in enumerate(values)]
    for history in case_histories(entries):
        changes = find_changes(history)
        assert all(0 <= change.last < change.index < len(values) for change in changes)
        assert not any("inf" in text or "nan" in text for change in changes for text in change.cells[4:7])


# the command


def test_changes_exits_with_1_for_a_new_change_and_names_what_else_differs(here, otava, capsys):
    entries = entries_of(STEADY + SLOWER[:CONFIRMING_VERSIONS])
    entries[20] = with_values(20, {"step_time_p50": SLOWER[0]}, torch="2.12.0")
    write_history(here / "history", entries)
    assert main(["history", "history"]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"step_time_p50 +{commit_of(19)[:12]} +{commit_of(20)[:12]} .*worse\n", out)
    assert (
        "step_time_p50: environment: torch 2.11.0 -> 2.12.0; to settle it: pytest tests/test_a.py::test_x --aorta-"
        in out
    )
    assert out.endswith("1 new change, 0 of earlier versions, in 4 metrics of 1 case\n")


@pytest.mark.parametrize(
    ("cause", "number"), [(cause, number) for cause, plants in PLANTS.items() for number in range(len(plants))]
)
def test_cause_of_a_change_is_named_where_something_tells_it(here, otava, cause, number):
    found = named(here / "history", PLANTS[cause][number], random.Random(3))
    assert found == ([] if cause == "none" else [cause])


def test_changes_exits_with_1_for_a_line_that_cannot_be_read(here, otava, capsys):
    write_history(here / "history", entries_of(STEADY))
    (here / "history" / "z.jsonl").write_text("{}\n{")
    assert main(["history", "history"]) == 1
    err = capsys.readouterr().err
    assert "aorta: left out: history/z.jsonl:1: $: Object missing required field" in err
    assert "history/z.jsonl:2: not valid JSON" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["history", "--branch", "gone"], 2, "--branch: got 'gone', allowed is one of ['main']"),
        (["empty"], 2, "contains no history, i.e. no file whose name ends in .jsonl; the option --aorta-history="),
    ],
)
def test_what_can_not_be_searched_is_an_error(here, otava, capsys, arguments, code, message):
    write_history(here / "history", entries_of(STEADY))
    (here / "empty").mkdir()
    assert main(["history", *arguments]) == code
    assert message in capsys.readouterr().err


def test_series_that_are_too_short_for_any_change_are_named(here, otava, capsys):
    write_history(here / "history", entries_of([10.0, 10.0, 44.0, 44.0]))
    assert main(["history", "history"]) == 0
    assert "not searched: 4 metrics with fewer than the 6 versions that a change needs" in capsys.readouterr().out


def test_branches_are_not_mixed(here, otava, capsys):
    pull = [with_values(number, {"step_time_p50": 12.0}, branch=None) for number in range(3)]
    write_history(
        here / "history",
        [*entries_of(STEADY), *(row.replace(run=f"20260105T030000.000000Z-{n:08x}") for n, row in enumerate(pull, 99))],
    )
    assert main(["history", "history"]) == 2
    assert "allowed is one of ['HEAD', 'main']" in capsys.readouterr().err
    assert main(["history", "history", "--branch", "main"]) == 0


def test_without_otava_the_command_says_how_to_install_it(here, capsys, no_otava):
    write_history(here / "history", entries_of(STEADY))
    assert main(["history", "history"]) == 2
    assert "pip install 'pytest-aorta[history]'" in capsys.readouterr().err
