"""Launches over several nodes."""

import json
import os
import re
from pathlib import Path

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import read_model, to_builtins
from pytest_aorta.launch import nodes
from pytest_aorta.launch.guarded import launch_environment, prepare_folder
from pytest_aorta.launch.nodes import node_rank, own_hello, take_part
from pytest_aorta.launch.process.torchrun import Endpoint, _interface_to, _own_address
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import World
from pytest_aorta.result.folder import node_folder, rank_folder
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import each_of, gpus, make_plan, read_json, replace


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    """The plan of a launch on two nodes, whose run folder is prepared."""
    plan = make_plan(tmp_path / "run", world=World(4, "cpu", nodes=2), script="os", cwd=tmp_path)
    prepare_folder(plan)
    return plan


def outcome_of(plan: LaunchPlan, node: int) -> LaunchOutcome:
    """Return the outcome of a node's part, which has ended all nodes."""
    assert not take_part(plan.run_dir, node)
    assert (plan.run_dir / "stopping").exists()
    return read_model(node_folder(plan.run_dir, node) / "outcome.json", LaunchOutcome, max_bytes=1 << 20)


def test_ranks_folders_lead_to_those_of_the_nodes(plan):
    (rank_folder(plan.run_dir, 3) / "pid").write_text("7")
    assert (plan.run_dir / "nodes/1/ranks/3/pid").read_text() == "7"


def test_dumps_of_all_nodes_are_in_one_folder(tmp_path):
    plan = make_plan(tmp_path / "run", world=World(2, "cuda", tuple(gpus(1)), 2))
    prepare_folder(plan)
    (plan.run_dir / "nodes/1/flight/rank_1").touch()
    assert (plan.run_dir / "flight/rank_1").exists()


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"SLURM_NODEID": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "2"}, 2),
        ({"AORTA_NODE_RANK": "4", "SLURM_NODEID": "1"}, 4),
    ],
)
def test_node_reads_its_number_from_a_variable(environ, rank):
    assert node_rank(environ) == rank


@pytest.mark.parametrize(
    ("environ", "part"), [({}, "set one of AORTA_NODE_RANK, SLURM_NODEID"), ({"SLURM_NODEID": "a"}, "SLURM_NODEID='a'")]
)
def test_node_without_a_valid_number_names_the_variables(environ, part):
    with pytest.raises(LaunchError, match=part):
        node_rank(environ)


def test_address_that_the_user_has_given_reaches_the_agents_of_several_nodes(tmp_path):
    plan = make_plan(tmp_path, world=World(4, "cpu", nodes=2))
    assert launch_environment(plan, {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("192.0.2.1", "'192.0.2.1' is no address of this host"),
        ("no-such.invalid", "'no-such.invalid' is no address of this host"),
        (None, "'localhost' is the loopback address 127.0.0.1, which no other node reaches; set MASTER_ADDR"),
    ],
)
def test_address_that_no_other_node_reaches_is_refused(monkeypatch, given, part):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    monkeypatch.setenv("MASTER_ADDR", given or "")
    with pytest.raises(SystemExit, match=part):
        _own_address()


def test_interface_that_leads_to_node_zero_is_found(monkeypatch):
    assert _interface_to(Endpoint("127.0.0.1", 1)) == "lo"
    monkeypatch.setattr("socket.if_nameindex", list)
    assert _interface_to(Endpoint("127.0.0.1", 1)) is None


@pytest.mark.parametrize(
    ("zero", "changes", "part"),
    [
        ({"host": "another"}, {}, "pytest runs on another and node 0 is "),
        ({"torch": "1.0"}, {}, r"torch .* \(node 0: 1.0\); versions have to be equal"),
        ({}, {"script": "/absent/train.py"}, "/absent/train.py is missing; every node needs the code"),
        ({}, {"cwd": Path("/absent")}, "/absent is missing; every node needs the code"),
    ],
)
def test_node_that_can_not_take_part_leaves_the_reason_and_ends_all(plan, zero, changes, part):
    write_json(plan.run_dir / "nodes/hello.json", own_hello() | zero)
    write_json(plan.run_dir / "plan.json", to_builtins(replace(plan, **changes)))
    outcome = outcome_of(plan, 0)
    assert outcome.reason == EndReason.NODE_MISMATCH
    assert re.search(part, outcome.detail)


def test_node_with_other_gpus_is_refused(plan, nvml, monkeypatch, tmp_path):
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    nvml.names = ("GPU-0",)
    cuda = replace(plan, world=World(2, "cuda", tuple(gpus(1)), 2))
    write_json(plan.run_dir / "plan.json", to_builtins(cuda))
    assert "GPUs are ['model 0'], node 0's are ['NVIDIA H200']" in outcome_of(plan, 1).detail


def test_surplus_agent_and_an_agent_without_a_plan_say_so(plan, monkeypatch, capsys):
    monkeypatch.setenv("AORTA_NODE_RANK", "2")
    assert cli.main(["agent", str(plan.run_dir)]) == 1
    assert "says it is node 2; the launcher has to start one agent on each of 2 nodes" in capsys.readouterr().err
    assert not (plan.run_dir / "stopping").exists()
    (plan.run_dir / "plan.json").unlink()
    assert cli.main(["agent", str(plan.run_dir)]) == 1
    assert "plan.json: can't be read: No such file" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_run_folder_of_another_user_is_refused(plan):
    os.chown(plan.run_dir, 12345, -1)
    assert "belongs to user 12345, and files of this agent to user 0" in outcome_of(plan, 1).detail
    assert not (plan.run_dir / "nodes/1/agent.log").exists()


def left(reason: EndReason, status: int | None = None, detail: str = "") -> str:
    """Return shell words that leave an outcome as an agent does."""
    return json.dumps(to_builtins(LaunchOutcome(reason, status, (), (), 1.0, detail=detail)))


ENDED, FAILED, STOPPED = left(EndReason.EXIT, 0), left(EndReason.EXIT, 1), left(EndReason.STOPPED)
# What each of two nodes has left -> the reason, and what the failure says.
CAUSES = {
    "well": ((ENDED, ENDED), EndReason.EXIT, ""),
    "first failure": ((STOPPED, FAILED), EndReason.EXIT, ""),
    "lost guard": ((FAILED, left(EndReason.GUARD_LOST)), EndReason.GUARD_LOST, "node 1 (host1): its guard was killed"),
    "killed agent": (
        (FAILED, ""),
        EndReason.NODE_LOST,
        "node 1 (host1): its agent has left no outcome; it ran ranks 2, 3",
    ),
    "agent that was terminated": (
        (left(EndReason.NODE_LOST, detail="its agent was sent SIGTERM"), STOPPED),
        EndReason.NODE_LOST,
        "node 0 (host0): its agent was sent SIGTERM; it ran ranks 0, 1",
    ),
    "mismatch": (
        (STOPPED, left(EndReason.NODE_MISMATCH, detail="torch 1.0 (node 0: 2.0)")),
        EndReason.NODE_MISMATCH,
        "node 1 (host1): torch 1.0 (node 0: 2.0)",
    ),
}


@each_of("files, reason, detail", CAUSES)
def test_launch_ends_as_the_node_that_caused_it(tmp_path, files, reason, detail):
    for node, text in enumerate(files):
        (tmp_path / f"hello{node}").write_text(json.dumps({"host": f"host{node}"}))
        (tmp_path / f"outcome{node}").write_text(text)
        report = {"failures": [{"rank": node, "exit_code": 3}], "running": []}
        (tmp_path / f"agent{node}").write_text(json.dumps(report))
    script = """
for node in 0 1; do
  for name in hello outcome agent; do
    [ -s $0/$name$node ] && cp $0/$name$node $1/nodes/$node/$name.json
  done
  echo log of $node > $1/nodes/$node/agent.log
done
:
"""
    run = tmp_path / "run"
    launcher = ("sh", "-c", script, str(tmp_path), str(run))
    plan = make_plan(run, world=World(4, "cpu", nodes=2), script="os", cwd=tmp_path, node_launcher=launcher)
    outcome = nodes.launch_on_nodes(plan)
    assert (outcome.reason, outcome.detail) == (reason, detail)
    merged = read_json(run / "agent.json")
    assert merged == {"failures": [{"rank": 0, "exit_code": 3}, {"rank": 1, "exit_code": 3}], "running": []}
    assert "log of 1" in (run / "agent.log").read_text()
