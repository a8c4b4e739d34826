"""Failing node launchers with real node agents on this host; no rank is started."""

import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest

from pytest_aorta.launch.nodes import launch_on_nodes
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.folder import node_folder
from tests.unit import builders
from tests.unit.builders import each_of

# Only an agent or a launcher that hangs reaches this limit.
HANG_S = 120.0
# Starts the agents on one host as srun does on several hosts; the shell's arguments are the nodes' numbers.
EACH = 'for rank in $0; do AORTA_NODE_RANK=$rank "$@" & pids="$pids $!"; done; wait $pids'
# As srun does when an agent dies: its last message, and SIGTERM for the agents of other nodes.
KILLS_ONE = """
AORTA_NODE_RANK=1 "$@" & one=$!
until [ -e {run}/nodes/1/hello.json ]; do sleep 0.1; done
kill -9 $one; wait $one
echo "error: Task launch failed on node node1" >&2
exit 9
"""


def make_plan(folder: Path, *launcher: str, script: str = "os", timeout_s: float = HANG_S) -> LaunchPlan:
    return builders.make_plan(
        folder / "run",
        name="os",
        config={},
        script=script,
        world=World(2, "cpu", nodes=2),
        timeout_s=timeout_s,
        cwd=folder,
        node_launcher=launcher,
    )


def failed(plan: LaunchPlan) -> str:
    outcome = launch_on_nodes(plan)
    assert outcome.survivors == ()
    failure = launch_failure(plan, outcome)
    assert failure is not None
    return failure.text


@each_of(
    "launcher, changes, parts",
    {
        "fails": (
            ("sh", "-c", "echo no such partition >&2; exit 127"),
            {},
            [
                "node launcher: node launcher sh -c",
                "ended with exit code 127 after ",
                "when 0 of 2 nodes had an agent",
                "  | no such partition",
            ],
        ),
        "missing": (
            ("/absent/srun",),
            {},
            ["node launcher: node launcher /absent/srun ended with ", "  | FileNotFoundError: "],
        ),
        "two agents on a node": (
            ("sh", "-c", EACH, "1 1"),
            {},
            ["says it is node 1, and so does ", "one agent on each of 2 nodes"],
        ),
        "too few agents": (
            ("sh", "-c", EACH, "0"),
            {"timeout_s": 8},
            ["node launcher sh -c ", "when 1 of 2 nodes had an agent: node 0 ("],
        ),
        "no script on a node": (
            ("sh", "-c", EACH, "0 1"),
            {"script": "/absent/train.py"},
            [
                "node mismatch: node ",
                "/absent/train.py is missing; every node needs the code at the same path as node 0",
            ],
        ),
        # As on a node with another /tmp.
        "no shared folder": (
            ("sh", "-c", 'AORTA_NODE_RANK=1; export AORTA_NODE_RANK; exec "$@"x', "sh"),
            {},
            ["--aorta-results has to name a folder on a file system that every node shares"],
        ),
    },
)
def test_launcher_or_node_is_named_with_what_it_did(tmp_path, launcher, changes, parts):
    text = failed(make_plan(tmp_path, *launcher, **changes))
    assert [part for part in parts if part not in text] == [], text


def test_launcher_that_fails_on_one_node_is_named_with_its_last_output(tmp_path):
    script = KILLS_ONE.format(run=tmp_path / "run")
    text = failed(make_plan(tmp_path, "sh", "-c", script, "sh"))
    assert "ended with exit code 9 after " in text
    assert "when 1 of 2 nodes had an agent: node 1 (" in text
    assert "  | error: Task launch failed on node node1" in text


def test_run_folder_is_closed_to_other_users(tmp_path):
    plan = make_plan(tmp_path, "false")
    failed(plan)
    assert plan.run_dir.stat().st_mode & 0o777 == 0o700
    assert node_folder(plan.run_dir, 1).is_dir()


def test_interrupted_launch_ends_its_agents(tmp_path):
    plan = make_plan(tmp_path, "sh", "-c", EACH, "1")
    interruption = Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interruption.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch_on_nodes(plan)
    finally:
        interruption.cancel()
    assert time.monotonic() - began_s < HANG_S / 2
