"""Failing node launchers with real node agents on this host; no rank is started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.launch.guarded import launch
from pytest_aorta.launch.nodes.handover import start_coordinator
from pytest_aorta.plan.launch_plan import LaunchPlan, NodeGroup
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis.launch import launch_failure

TOKEN = "secret"
# Only an agent or a launcher that hangs reaches this limit.
HANG_S = 120.0
# Time limits of node 0's wait for agents: the first suffices on idle cores, and the next are for busy cores.
JOIN_LIMITS_S = (4.0, 16.0, 64.0)
# Starts the agents on one host as srun does on several hosts; the shell's arguments are the nodes' numbers.
EACH = 'for rank in $0; do AORTA_NODE_RANK=$rank "$@" & pids="$pids $!"; done; wait $pids'

# An agent that connects, waits for the plan and dies; then srun's last message, and its wait for other nodes.
KILLED = f"""
import socket, sys, time
from pytest_aorta.launch.nodes.handover import versions
from pytest_aorta.launch.nodes.wire import Wire
host, port = sys.argv[-1].split(":")
wire = Wire(socket.create_connection((host, int(port))), b"{TOKEN}", is_server=False)
wire.send({{
    "type": "hello", "node_rank": 0, "host": "host0", "address": "127.0.0.1", "store_port": 1, "is_waiting": False,
    "versions": versions(),
}})
wire.receive()
wire.close()
print("error: Task launch failed on node node1", file=sys.stderr, flush=True)
time.sleep(60)
"""


def make_plan(folder: Path, *launcher: str, script: str = "os", **changes: object) -> LaunchPlan:
    group = replace(NodeGroup(2, launcher, "127.0.0.1", 0, HANG_S), **changes)
    folder.mkdir(exist_ok=True)
    return LaunchPlan("os", None, {}, script, (), World(2, "cpu", nodes=2), HANG_S, folder / "run", folder, group=group)


def failed(plan: LaunchPlan, environ: dict[str, str] | None = None) -> str:
    outcome = launch(plan, dict(os.environ) | (environ or {}), start_coordinator)
    assert outcome.survivors == ()
    failure = launch_failure(plan, outcome)
    assert failure is not None
    return failure.text


def test_failing_launcher_is_named_with_its_exit_code_and_output(tmp_path):
    text = failed(make_plan(tmp_path, "sh", "-c", "echo no such partition >&2; exit 127"))
    assert "node launcher: node launcher sh -c" in text
    assert "ended with exit code 127 when 0 of 2 nodes had an agent here" in text
    assert "  | no such partition" in text


def test_missing_launcher_is_named(tmp_path):
    text = failed(make_plan(tmp_path, "/absent/srun"))
    assert "node launcher /absent/srun can't be started: No such file or directory" in text


def test_launcher_that_starts_too_few_agents_is_reported_with_the_agents_that_connected(tmp_path):
    for limit_s in JOIN_LIMITS_S:
        text = failed(make_plan(tmp_path / f"{limit_s:g}", "sh", "-c", EACH, "0", join_timeout_s=limit_s))
        if " 0 of 2 nodes " not in text:
            break
    assert f"{limit_s:g} s after its start 1 of 2 nodes had an agent here: node 0 (" in text


def test_launcher_that_fails_on_one_node_and_kills_the_agent_of_another_is_named(tmp_path):
    text = failed(make_plan(tmp_path, sys.executable, "-c", KILLED), {variables.AGENT_TOKEN: TOKEN})
    assert "node launcher: node launcher " in text
    assert "failed when 1 of 2 nodes had an agent here: node 0 (host0); node 0 (host0) was lost after " in text
    assert "  | error: Task launch failed on node node1" in text


def test_launcher_that_starts_two_agents_on_a_node_is_reported(tmp_path):
    text = failed(make_plan(tmp_path, "sh", "-c", EACH, "1 1"))
    assert "says it is node 1, and so does " in text
    assert "has to start one agent on each of 2 nodes" in text


def test_launcher_that_passes_no_token_on_is_reported_with_the_agents_message(tmp_path):
    text = failed(make_plan(tmp_path, "sh", "-c", "unset AORTA_AGENT_TOKEN; " + EACH, "0 1"))
    assert "AORTA_AGENT_TOKEN is not set: a launcher has to hand on node 0's environment" in text


def test_agents_with_another_token_are_refused(tmp_path):
    text = failed(make_plan(tmp_path, "env", "AORTA_AGENT_TOKEN=another", "sh", "-c", EACH, "0 1"))
    assert "a connection from 127.0.0.1 was refused: the other side has a different AORTA_AGENT_TOKEN" in text


def test_node_without_the_script_is_reported(tmp_path):
    text = failed(make_plan(tmp_path, "sh", "-c", EACH, "0 1", script="/absent/train.py"))
    assert "node mismatch: node " in text
    assert "/absent/train.py is missing; every node needs the code at the same path as node 0" in text


def test_taken_port_is_named(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = failed(make_plan(tmp_path, sys.executable, port=port))
    assert f"node launcher: 127.0.0.1:{port}: Address already in use" in text


def test_interrupted_launch_ends_its_agents(tmp_path, monkeypatch):
    plan = make_plan(tmp_path, "sh", "-c", EACH, "1")

    def interrupted(*_: object) -> None:
        time.sleep(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_aorta.launch.guarded.GuardedLaunch.wait", interrupted)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(plan, os.environ, start_coordinator)
    assert time.monotonic() - began_s < HANG_S / 2
