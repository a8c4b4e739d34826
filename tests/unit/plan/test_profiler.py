"""Tests of profilers: the command lines of wrappers, and notes about traces."""

import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import ColdLaunchWarning
from pytest_aorta.launch.guarded import agent_command
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.options import LauncherKind, ProfilerSchedule
from tests.unit.builders import make_plan


@pytest.mark.parametrize(
    ("profiler", "first", "others"),
    [
        (
            "nsys",
            ["nsys", "profile", "--output={}/nsys"],
            {"--trace=cuda,nvtx,osrt", "--capture-range=none", "--wait=all"},
        ),
        ("rocprofv3", ["rocprofv3"], {"-d", "{}/rocprofv3", "--"}),
        ("torch", [], set()),
    ],
)
def test_wrapper_is_started_around_torchrun_and_writes_to_the_run_folder(tmp_path, profiler, first, others):
    bare, command = agent_command(make_plan(tmp_path)), agent_command(make_plan(tmp_path, profiler=profiler))
    before = command[: -len(bare)]
    assert command[-len(bare) :] == bare
    assert before[: len(first)] == [word.format(tmp_path) for word in first]
    assert {word.format(tmp_path) for word in others} <= set(before)
    assert bool(before) == bool(first)


def test_schedule_of_words_has_defaults_for_the_others():
    assert ProfilerSchedule.parse(" repeat=2  shapes ") == ProfilerSchedule(0, 1, None, 2, shapes=True)
    assert str(ProfilerSchedule.parse("memory active=3")) == "wait=0 warmup=1 active=3 repeat=1 memory"


@given(
    st.builds(
        ProfilerSchedule,
        st.integers(0, 100_000),
        st.integers(0, 1000),
        st.none() | st.integers(1, 1000),
        st.integers(1, 100),
        st.booleans(),
        st.booleans(),
    )
)
def test_schedule_is_read_from_its_own_text(schedule):
    assert ProfilerSchedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("active=0", "got '0', allowed is an integer from 1 to 1000"),
        ("wait=-1", "got '-1', allowed is an integer from 0 to 100000"),
        ("repeat=1e2", "got '1e2', allowed is an integer from 1 to 100"),
        ("repeat=101", "got '101', allowed is an integer from 1 to 100"),
        ("wait=", "got '', allowed is an integer from 0 to 100000"),
        ("wait", "got 'wait', allowed is wait=N, warmup=N, active=N, repeat=N, shapes, memory"),
        ("shapes=1", "got 'shapes=1', allowed is wait=N"),
        ("stacks", "got 'stacks', allowed is wait=N"),
    ],
)
def test_wrong_schedule_is_refused_with_its_word(text, message):
    with pytest.raises(ArgumentTypeError, match=re.escape(message)):
        ProfilerSchedule.parse(text)


def test_wrapped_launch_is_cold_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pytest_aorta.launch.warm.require_torch", lambda: None)
    plan = make_plan(tmp_path / "run", launcher=LauncherKind.FORKSERVER, profiler="nsys", cwd=tmp_path)
    servers = ForkServers({"PATH": str(tmp_path)})
    message = "fork server is unfit: nsys profiles only processes that it has started"
    with pytest.warns(ColdLaunchWarning, match=message):
        outcome = servers.launch(plan)
    # There is no nsys on this PATH.
    assert (outcome.reason, outcome.agent_status) == ("exit", 1)
    assert servers.pids == []
