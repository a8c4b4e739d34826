"""Tests of profilers: the command lines of wrappers, and notes about traces."""

from pathlib import Path

import pytest

from pytest_aorta.common.errors import ColdLaunchWarning
from pytest_aorta.launch.guarded import agent_command
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.options import LauncherKind
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
