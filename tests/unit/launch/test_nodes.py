"""Launches over several nodes."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.launch import nodes
from pytest_aorta.launch.guarded import launch_environment, prepare_folder
from pytest_aorta.launch.nodes import (
    Coordinator,
    Heart,
    Heartbeat,
    Hello,
    Orders,
    Pulse,
    node_rank,
    own_hello,
    read,
    take_part,
    write,
)
from pytest_aorta.launch.process.torchrun import Endpoint, _interface_to, _own_address
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import World
from pytest_aorta.result.folder import node_folder, rank_folder
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import gpus, make_plan, replace

ENDED = LaunchOutcome(EndReason.EXIT, 0, (), (), 1.0)
FAILED = LaunchOutcome(EndReason.EXIT, 1, (), (), 1.0)
STOPPED = LaunchOutcome(EndReason.STOPPED, None, (), (), 1.0)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    """The plan of a launch on two nodes, whose run folder is prepared."""
    plan = make_plan(tmp_path / "run", world=World(4, "cpu", nodes=2), script="os", cwd=tmp_path)
    prepare_folder(plan)
    (plan.run_dir / "plan.json").write_text(json.dumps(to_builtins(plan)))
    write(plan.run_dir / "nodes", own_hello())
    return plan


def verdict_of(plan: LaunchPlan, node: int) -> LaunchOutcome:
    found = read(node_folder(plan.run_dir, node), LaunchOutcome)
    assert found is not None
    return found


def test_ranks_folders_lead_to_those_of_the_nodes(plan):
    (rank_folder(plan.run_dir, 3) / "pid").write_text("7")
    assert (plan.run_dir / "nodes/1/ranks/3/pid").read_text() == "7"


def test_dumps_of_all_nodes_are_in_one_folder(tmp_path):
    plan = make_plan(tmp_path / "run", world=World(2, "cuda", tuple(gpus(1)), 2))
    prepare_folder(plan)
    (plan.run_dir / "nodes/1/flight/rank_1").touch()
    assert (plan.run_dir / "flight/rank_1").exists()


@pytest.mark.parametrize(
    ("given", "environ", "rank"),
    [
        (3, {"SLURM_NODEID": "1"}, 3),
        (None, {"SLURM_NODEID": "1"}, 1),
        (None, {"JOB_COMPLETION_INDEX": "2"}, 2),
        (None, {"AORTA_NODE_RANK": "4", "SLURM_NODEID": "1"}, 4),
    ],
)
def test_node_reads_its_number_from_the_option_or_a_variable(given, environ, rank):
    assert node_rank(given, environ) == rank


@pytest.mark.parametrize(
    ("environ", "part"), [({}, "set one of AORTA_NODE_RANK, SLURM_NODEID"), ({"SLURM_NODEID": "a"}, "SLURM_NODEID='a'")]
)
def test_node_without_a_valid_number_names_the_variables(environ, part):
    with pytest.raises(LaunchError, match=part):
        node_rank(None, environ)


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


def test_heartbeats_are_counted_and_carry_orders(tmp_path):
    pulse = Pulse(tmp_path)
    assert (pulse.silent_s() < 60, pulse.orders) == (True, Orders.WAIT)
    with Heart(tmp_path) as heart:
        heart.order(Orders.STOP)
        deadline_s = time.monotonic() + 60
        while pulse.orders != Orders.STOP and time.monotonic() < deadline_s:
            pulse.silent_s()
    assert pulse.orders == Orders.STOP


def test_silence_lasts_until_the_count_changes(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    pulse = Pulse(tmp_path)
    for now_s, count, silent_s in ((101, 1, 0), (104, 1, 3), (105, 2, 0), (115, 2, 10)):
        now[0] = now_s
        write(tmp_path, Heartbeat(count))
        assert pulse.silent_s() == silent_s


@pytest.mark.parametrize(
    ("zero", "changes", "part"),
    [
        (Hello("another", {}), {}, "pytest runs on another and node 0 is "),
        (replace(own_hello(), versions={"torch": "1.0"}), {}, r"torch .* \(node 0: 1.0\); versions have to be equal"),
        (own_hello(), {"script": "/absent/train.py"}, "/absent/train.py is missing; every node needs the code"),
        (own_hello(), {"cwd": Path("/absent")}, "/absent is missing; every node needs the code"),
    ],
)
def test_node_that_can_not_take_part_leaves_the_reason(plan, zero, changes, part):
    write(plan.run_dir / "nodes", zero)
    write_json(plan.run_dir / "plan.json", to_builtins(replace(plan, **changes)))
    take_part(plan.run_dir, 0)
    outcome = verdict_of(plan, 0)
    assert outcome.reason == EndReason.NODE_MISMATCH
    assert re.search(part, outcome.detail)


def test_node_with_other_gpus_is_refused(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setattr(nodes, "visible_devices", lambda: gpus(1, "A100"))
    cuda = replace(plan, world=World(2, "cuda", tuple(gpus(1)), 2))
    write_json(plan.run_dir / "plan.json", to_builtins(cuda))
    write(plan.run_dir / "nodes", Heartbeat(1, Orders.RUN))
    take_part(plan.run_dir, 1)
    assert "GPUs are ['A100'], node 0's are ['NVIDIA H200']" in verdict_of(plan, 1).detail


def test_stopped_node_starts_nothing(plan):
    write(plan.run_dir / "nodes", Heartbeat(1, Orders.STOP))
    take_part(plan.run_dir, 1)
    assert verdict_of(plan, 1).reason == EndReason.STOPPED
    assert not (plan.run_dir / "nodes/1/agent.log").exists()


def test_surplus_agent_says_so(plan, capsys):
    assert cli.main(["agent", str(plan.run_dir), "--node-rank=2"]) == 1
    assert "says it is node 2; the launcher has to start one agent on each of 2 nodes" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_run_folder_of_another_user_is_refused(plan):
    os.chown(plan.run_dir, 12345, -1)
    with pytest.raises(LaunchError, match="belongs to user 12345, and files of this agent to user 0"):
        take_part(plan.run_dir, 1)


def judged(plan: LaunchPlan, *verdicts: LaunchOutcome | None, silent_s: float = 11.0) -> tuple[Any, Any, str]:
    """Return the coordinator's judgement of nodes with these verdicts; a node without one is silent."""
    # On a busy machine, tenths of a second would pass between the nodes.
    now_s = time.monotonic()
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(nodes.time, "monotonic", lambda: now_s)
        coordinator = Coordinator(plan, -1)
        for node, verdict in zip(coordinator.nodes, verdicts, strict=True):
            write(node.folder, Hello(f"host{node.number}", {}))
            node.look(10)
            if verdict:
                write(node.folder, verdict)
            node.pulse._since_s -= silent_s
            node.look(10)
        return coordinator.judgement()


GUARD_LOST = LaunchOutcome(EndReason.GUARD_LOST, None, (), (), 1.0)


NODE_VERDICTS = {
    "well": ((ENDED, ENDED), (EndReason.EXIT, 0, "")),
    "first failure": ((FAILED, STOPPED), (EndReason.EXIT, 1, "")),
    "lost guard": ((FAILED, GUARD_LOST), (EndReason.GUARD_LOST, None, "node 1 (host1): its guard was killed")),
}


@pytest.mark.parametrize(("verdicts", "judgement"), NODE_VERDICTS.values(), ids=NODE_VERDICTS)
def test_launch_ends_as_the_node_that_caused_it(plan, verdicts, judgement):
    assert judged(plan, *verdicts) == judgement


def test_silent_node_is_lost_and_named_with_its_ranks(plan):
    reason, status, detail = judged(plan, ENDED, None)
    assert (reason, status) == (EndReason.NODE_LOST, None)
    assert detail == "node 1 (host1) was lost after 0.0 s: no heartbeat for 11 s; it ran ranks 2, 3"


def test_node_whose_agent_died_is_named_before_those_that_the_launcher_then_ended(plan):
    terminated = replace(STOPPED, reason=EndReason.NODE_LOST)
    _, _, detail = judged(plan, terminated, None)
    assert detail.startswith("node 1 (host1) was lost")
    assert "; node 0 (host0) was lost after 0.0 s: its agent was sent SIGTERM; it ran ranks 0, 1" in detail


def test_reports_and_logs_of_all_torchrun_agents_are_merged(plan, capsys):
    coordinator = Coordinator(plan, -1)
    reports = ({"failures": [{"rank": 1, "exit_code": 3}], "running": [0]}, {"failures": [], "running": [2, 3]})
    for node, report in zip(coordinator.nodes, reports, strict=True):
        write_json(node.folder / "agent.json", report)
        (node.folder / "agent.log").write_text(f"log of {node.number}\n")
    coordinator.keep_failures()
    merged = json.loads((plan.run_dir / "agent.json").read_text())
    assert merged == {"failures": [{"rank": 1, "exit_code": 3}], "running": [0, 2, 3]}
    assert "== node 1 ==\nlog of 1" in capsys.readouterr().out
