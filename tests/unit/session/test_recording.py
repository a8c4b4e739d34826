"""Interrupted recordings: which launches the next recording continues with, and what keeps a file or removes it."""

from __future__ import annotations

import pytest

from pytest_aorta.common.errors import BaselineError, LaunchError
from pytest_aorta.session import baselines
from pytest_aorta.session.baselines import recorded, unfinished_recordings
from pytest_aorta.session.rounds import settle
from pytest_aorta.verdict.baseline import StoredLaunch
from tests.unit.builders import make_baseline, make_facts, make_options, replace


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "code_digest", lambda folder, without: "0" * 16)
    return make_options(unfinished=tmp_path)


def first(**changes):
    return make_baseline(launches=(StoredLaunch(make_facts(**changes)),))


def interrupted_after(number, options, **changes):
    """Record until Ctrl-C in the launch after ``number`` launches; each step time is the launch's number."""
    left = [make_facts(final_loss=float(count), **changes) for count in range(2, number + 1)]

    def again(side):
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    with pytest.raises(KeyboardInterrupt):
        settle(recorded(options, first(final_loss=1.0, **changes), number + 1), again)


def continued(options, wanted, **changes):
    """Return the losses of a recording that continues, whose own launches have the losses 100, 101 and so on."""
    own = iter(range(101, 200))
    recording = recorded(options, first(final_loss=100.0, **changes), wanted)
    launches, note = settle(recording, lambda side: make_facts(final_loss=float(next(own)), **changes))
    return [launch.final_loss for launch in launches], note


def test_launches_that_were_kept_come_first(options):
    interrupted_after(3, options)
    assert continued(options, 5) == (
        [1.0, 2.0, 3.0, 100.0, 101.0],
        "3 launches of an interrupted recording among them",
    )
    assert list(options.unfinished.rglob("*.json")) == []


def test_recording_of_fewer_launches_uses_the_latest(options):
    interrupted_after(5, options)
    assert continued(options, 3)[0] == [4.0, 5.0, 100.0]


def test_single_launch_is_recorded_by_itself(options):
    interrupted_after(3, options)
    assert continued(options, 1) == ([100.0], "")


def test_second_interruption_keeps_the_launches_of_both(options):
    interrupted_after(2, options)

    def interrupt(side):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        settle(recorded(options, first(final_loss=9.0), 10), interrupt)
    assert continued(options, 4)[0] == [1.0, 2.0, 9.0, 100.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_steps": 30}, "the baseline was recorded with 20 measured steps, the test has 30"),
        ({"launcher": "forkserver"}, "launcher is 'forkserver', the baseline's 'torchrun'"),
        ({"block": "f" * 12}, "they belong to another session block"),
        ({"recorded_at": "2026-01-02T11:04:05Z"}, "they belong to another session block"),
    ],
    ids=["steps", "launcher", "host", "pause"],
)
def test_launches_of_other_circumstances_are_not_used_and_the_reason_is_noted(options, changes, reason):
    interrupted_after(3, options)
    losses, note = continued(options, 2, **changes)
    assert losses == [100.0, 101.0]
    assert note == f"launches of an interrupted recording are not used: {reason}"


def test_launch_that_fails_keeps_nothing(options):
    def fail(side):
        raise LaunchError("boom", "signal", 0)

    with pytest.raises(LaunchError):
        settle(recorded(options, first(), 10), fail)
    assert list(options.unfinished.rglob("*.json")) == []


def test_nothing_is_written_if_the_version_of_the_code_is_not_known(options, monkeypatch):
    monkeypatch.setattr(baselines, "code_digest", lambda folder, without: None)
    interrupted_after(3, options)
    assert list(options.unfinished.rglob("*")) == []
    assert unfinished_recordings(options) == []


def test_damaged_file_is_an_error_that_names_it(options):
    interrupted_after(3, options)
    [path] = options.unfinished.rglob("*.json")
    path.write_text("{")
    with pytest.raises(BaselineError, match=path.name):
        continued(options, 5)
    [line] = unfinished_recordings(options)
    assert line.startswith(f"ERROR {path}")


def test_runs_that_record_nothing_report_nothing(options):
    interrupted_after(3, options)
    assert len(unfinished_recordings(options)) == 2
    assert unfinished_recordings(replace(options, unfinished=None)) == []
