from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.common import variables
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import write_json
from pytest_aorta.launch.command import agent_command, launch_environment
from pytest_aorta.launch.nodes import handover
from pytest_aorta.launch.nodes.agent import Agent, refuse_absent
from pytest_aorta.launch.nodes.coordinator import Coordinator
from pytest_aorta.launch.nodes.files import LOG_BYTES, RESULT_BYTES, node_files
from pytest_aorta.launch.nodes.handover import (
    node_group,
    node_rank,
    on_devices,
    own_address,
    plan_from_json,
    plan_to_json,
    versions,
)
from pytest_aorta.launch.nodes.network import endpoint_text, interface_of
from pytest_aorta.launch.nodes.node import MAX_NODE_BYTES, Node, NodeFailed, admitted
from pytest_aorta.launch.nodes.wire import CHUNK_BYTES, WireError, encode
from pytest_aorta.plan.launch_plan import NodePart
from pytest_aorta.plan.workload.declaration import WorkloadSpec
from pytest_aorta.plan.world import World
from pytest_aorta.result.folder import steps_entered
from tests.unit.builders import gpus, make_options, make_plan, replace

PART = NodePart(2, "10.0.0.1:2900", "run", "10.0.0.2", "eth0")


class FakeWire:
    """A connection that keeps sent messages."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


class ClosedWire:
    """A connection that node 0 has closed after it had sent ``messages``."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.event = os.eventfd(1)

    def fileno(self) -> int:
        return self.event

    def send(self, message: dict[str, Any]) -> None:
        raise WireError("the connection was closed")

    def receive(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise WireError("the connection was closed")
        messages, self.messages = self.messages, []
        return messages


def hello(rank: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "type": "hello", "node_rank": rank, "host": f"host{rank}", "address": "10.0.0.2", "store_port": None,
        "is_waiting": False, "versions": versions(),
    } | changes  # fmt: skip


def make_node(rank: int = 1) -> Node:
    return Node(rank, FakeWire(), hello(rank))  # type: ignore[arg-type]


def end(*, is_terminated: bool = False, **outcome: Any) -> dict[str, Any]:
    defaults = {"agent_status": None, "stopped": [], "survivors": [], "wall_s": 1.0}
    return {"type": "end", "outcome": defaults | outcome, "is_terminated": is_terminated}


SPEC = {"num_nodes": 2, "versions": versions()}


def test_launcher_receives_the_number_of_nodes():
    options = make_options(nnodes=2, node_launcher=("srun", "--nodes={nodes}"), rdzv_endpoint=("127.0.0.1", 29400))
    group = node_group(options, 2)
    assert group is not None
    assert (group.launcher, group.address, group.port) == (("srun", "--nodes=2"), "127.0.0.1", 29400)


def test_one_node_has_no_group():
    assert node_group(make_options(), 1) is None


def test_host_name_that_only_this_host_reaches_is_refused_unless_given():
    with pytest.raises(
        LaunchError,
        match=r"'localhost' is the loopback address .*, which no other node reaches; set .*aorta_rdzv_endp",
    ):
        own_address("localhost", given=False)
    assert own_address("127.0.0.1", given=True) == "127.0.0.1"


def test_host_name_without_an_address_is_refused():
    with pytest.raises(LaunchError, match=r"'no-such.invalid' can't be resolved .*aorta_rdzv_endpoint=ADDRESS"):
        own_address("no-such.invalid", given=True)


def test_address_of_another_machine_is_refused():
    with pytest.raises(LaunchError, match=r"'192.0.2.1' is 192.0.2.1, which is not an address of this machine"):
        own_address("192.0.2.1", given=True)


def test_interface_with_the_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize(("address", "text"), [("10.0.0.1", "10.0.0.1:1"), ("fd00::1", "[fd00::1]:1")])
def test_endpoint_of_either_kind_of_address(address, text):
    assert endpoint_text(address, 1) == text


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


def test_plan_is_the_same_on_the_other_node(tmp_path):
    spec = WorkloadSpec(
        name="toy",
        folder=tmp_path,
        class_name="Toy",
        description="a toy",
        properties={"steps": {"type": "integer"}},
        preload=("torch._inductor",),
    )
    plan = make_plan(tmp_path, spec=spec, script=None, world=World(4, "cuda", tuple(gpus(2)), 2), profiler="torch")
    there = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), tmp_path / "there")
    assert there == replace(plan, run_dir=tmp_path / "there")


def test_torchrun_agent_joins_the_rendezvous_of_all_nodes(tmp_path):
    plan = make_plan(tmp_path, world=World(4, "cpu", nodes=2), part=PART)
    assert agent_command(plan)[4:11] == [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:2900",
        "--rdzv-id=run",
        "--rdzv-conf=is_host=0,join_timeout=60",
        "--local-addr=10.0.0.2",
        "--nproc-per-node=2",
    ]


def test_ranks_receive_the_interface_and_not_the_token(tmp_path):
    plan = make_plan(tmp_path, world=World(4, "cpu", nodes=2), part=PART)
    environ = launch_environment(plan, {variables.AGENT_TOKEN: "secret"})
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert variables.AGENT_TOKEN not in environ
    assert launch_environment(plan, {"GLOO_SOCKET_IFNAME": "ib0"})["GLOO_SOCKET_IFNAME"] == "ib0"


def test_node_with_other_gpus_is_refused(tmp_path):
    plan = make_plan(tmp_path, world=World(2, "cuda", tuple(gpus(1)), 2))
    with pytest.raises(LaunchError, match=r"GPUs are \['A100'\], node 0's are \['NVIDIA H200'\]"):
        on_devices(plan, tuple(gpus(1, "A100")))


def test_code_that_is_not_on_this_node_is_named(tmp_path):
    plan = make_plan(tmp_path, script="/absent/train.py", cwd=tmp_path)
    with pytest.raises(
        LaunchError, match=r"/absent/train.py is missing; every node needs the code at the same path as node 0"
    ):
        refuse_absent(plan)
    refuse_absent(make_plan(tmp_path, script="package.module"))


def test_agent_of_another_version_is_refused():
    other = hello(versions=versions() | {"torch": "1.0"})
    with pytest.raises(NodeFailed, match=r"node 1 \(host1\) has torch 1.0 \(node 0: .*\); versions have") as caught:
        admitted(FakeWire(), other, SPEC, {})  # type: ignore[arg-type]
    assert caught.value.reason == "node_mismatch"


@pytest.mark.parametrize("rank", [1, 2])
def test_surplus_agent_is_refused(rank):
    with pytest.raises(NodeFailed, match=f"host{rank} says it is node {rank}") as caught:
        admitted(FakeWire(), hello(rank), SPEC, {1: make_node(1)})  # type: ignore[arg-type]
    assert caught.value.reason == "node_launcher"


@pytest.mark.parametrize("rank", [1, 2])
def test_waiting_agent_that_is_not_needed_becomes_no_node(rank):
    assert admitted(FakeWire(), hello(rank, is_waiting=True), SPEC, {1: make_node(1)}) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "ranks/2/result.json",
        "ranks/../../secret",
        "ranks/0/../../../secret",
        "/etc/passwd",
        "plan.json",
        "ranks/0/.ssh",
        "flight/rank_2",
        "ranks/0/result.json\n",
    ],
)
def test_file_that_no_agent_sends_is_refused(tmp_path, name):
    message = {"type": "file", "name": name, "data": "", "is_first": True}
    with pytest.raises(WireError, match="unknown file"):
        make_node().take(message, tmp_path, 2)


def test_parts_of_a_file_are_put_together(tmp_path):
    node = make_node()
    for part, is_first in ((b"one", True), (b"two", False)):
        message = {"type": "file", "name": "ranks/1/output.log", "data": encode(part), "is_first": is_first}
        node.take(message, tmp_path, 2)
    assert (tmp_path / "ranks/1/output.log").read_bytes() == b"onetwo"


def test_files_beyond_the_limit_are_refused(tmp_path):
    node = make_node()
    node.num_bytes = MAX_NODE_BYTES
    with pytest.raises(WireError, match="files of more than"):
        node.take({"type": "file", "name": "agent.log", "data": encode(b"a"), "is_first": True}, tmp_path, 2)


def heartbeat(**steps: int) -> dict[str, Any]:
    """Return a heartbeat of ranks 2 and 3, which have entered so many steps."""
    ranks = {name.removeprefix("rank"): {"pid": 40, "steps": count} for name, count in steps.items()}
    return {"type": "heartbeat", "ranks": ranks, "folder": "/tmp/here"}


def test_heartbeat_replaces_no_file_and_writes_only_counts_that_have_changed(tmp_path):
    """Replacing a file takes so long on a disk that node 0 could not follow the heartbeats of 100 nodes."""

    def stats() -> dict[str, tuple[int, int]]:
        files = (path for path in (tmp_path / "ranks").rglob("*") if path.is_file())
        return {
            str(path.relative_to(tmp_path / "ranks")): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files
        }

    node = make_node()
    for rank in (2, 3):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
    node.take(heartbeat(rank2=5, rank3=5), tmp_path, 4)
    before = stats()
    assert set(before) == {"2/pid", "2/progress", "3/pid", "3/progress"}
    node.take(heartbeat(rank2=5, rank3=6), tmp_path, 4)
    after = stats()
    assert [name for name in before if after[name] != before[name]] == ["3/progress"]
    assert after["3/progress"][0] == before["3/progress"][0]
    assert [steps_entered(tmp_path / "ranks" / rank) for rank in ("2", "3")] == [5, 6]


def test_progress_that_could_not_be_written_is_written_with_a_later_heartbeat(tmp_path):
    node = make_node()
    node.take(heartbeat(rank2=5), tmp_path, 4)
    (tmp_path / "ranks" / "2").mkdir(parents=True)
    node.take(heartbeat(rank2=5), tmp_path, 4)
    assert (tmp_path / "ranks" / "2" / "pid").read_text() == "40"
    assert steps_entered(tmp_path / "ranks" / "2") == 5


def test_count_of_steps_is_written_through_no_link(tmp_path):
    node, elsewhere = make_node(), tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "ranks" / "2").mkdir(parents=True)
    (tmp_path / "ranks" / "2" / "progress").symlink_to(elsewhere)
    node.take(heartbeat(rank2=5), tmp_path, 4)
    assert elsewhere.read_text() == "kept"


def test_fifo_in_place_of_a_count_of_steps_does_not_block_node_zero(tmp_path):
    (tmp_path / "ranks" / "2").mkdir(parents=True)
    os.mkfifo(tmp_path / "ranks" / "2" / "progress")
    make_node().take(heartbeat(rank2=5), tmp_path, 4)
    assert steps_entered(tmp_path / "ranks" / "2") == 0


def test_lost_node_is_reported_with_its_ranks_and_folder(tmp_path):
    node = make_node()
    ranks = {"3": {"pid": 33, "steps": 7}, "2": {"pid": 22, "steps": 6}}
    (tmp_path / "ranks/3").mkdir(parents=True)
    node.take({"type": "heartbeat", "ranks": ranks, "folder": "/tmp/here"}, tmp_path, 4)
    node.check(node.last_message_s + 10.6)
    assert node.lost.startswith("node 1 (host1) was lost after 0.0 s: no heartbeat for 11 s; it ran ranks 2, 3; if ")
    assert node.has_failed
    assert not node.is_running
    # The progress line and the failure's text read these files.
    assert (tmp_path / "ranks/3/pid").read_text() == "33"
    assert steps_entered(tmp_path / "ranks/3") == 7


def test_node_that_has_ended_is_not_lost_afterwards():
    node = make_node()
    node.take(end(reason="exit", agent_status=0), Path(), 4)
    node.check(node.last_message_s + 1000)
    assert (node.lost, node.has_failed) == ("", False)


def test_node_whose_agent_received_sigterm_is_lost_and_names_no_folder():
    node = make_node()
    node.take({"type": "heartbeat", "ranks": {}, "folder": "/tmp/here"}, Path(), 4)
    node.take(end(is_terminated=True, reason="stopped", survivors=[7]), Path(), 4)
    assert re.fullmatch(r"node 1 \(host1\) was lost after .* s: its agent was sent SIGTERM", node.lost)
    assert (node.wire.sent, node.survivors) == ([{"type": "bye"}], [7])  # type: ignore[attr-defined]


def test_stopped_node_is_not_lost_by_sigterm():
    # srun sends SIGTERM to every agent when the first agent has died.
    node = make_node()
    node.stop()
    node.take(end(is_terminated=True, reason="stopped"), Path(), 4)
    assert (node.lost, node.has_failed) == ("", True)


def write(folder: Path, name: str, size: int) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_end_of_a_log_and_beginning_of_other_files_are_sent(tmp_path):
    write(tmp_path, "agent.log", 10)
    write(tmp_path, "ranks/3/output.log", LOG_BYTES + 5)
    write(tmp_path, "ranks/3/result.json", RESULT_BYTES + 5)
    write(tmp_path, "ranks/3/core", 10)
    (tmp_path / "ranks/4").mkdir()
    parts = {name: (offset, size) for name, _, offset, size in node_files(tmp_path)}
    assert parts == {
        "agent.log": (0, 10),
        "ranks/3/output.log": (5, LOG_BYTES),
        "ranks/3/result.json": (0, RESULT_BYTES),
    }


def test_every_file_that_an_agent_sends_is_accepted(tmp_path):
    for name in ("pid", "marks", "progress", "output.log", "stacks.txt", "py-spy.txt", "error.json", "result.json"):
        write(tmp_path, f"ranks/1/{name}", 1)
    write(tmp_path, "ranks/1/suspended", 0)
    for name in ("ranks/1/collectives.json", "ranks/1/trace.json.gz", "flight/rank_1", "agent.log", "agent.json"):
        write(tmp_path, name, 1)
    for name in ("ranks/1/trace-2.json.gz", "ranks/1/telemetry.jsonl"):
        write(tmp_path, name, 1)
    names = [name for name, *_ in node_files(tmp_path)]
    assert len(names) == 16
    assert all(make_node().file_name(name, 2) for name in names)


def test_empty_files_and_long_files_arrive_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(Agent, "await_message", lambda *_: None)
    write(tmp_path / "there", "ranks/1/suspended", 0)
    write(tmp_path / "there", "ranks/1/output.log", 2 * CHUNK_BYTES + 1)
    (tmp_path / "there" / "ranks/1/pid").write_text("123")
    wire = FakeWire()
    Agent(("host0", 1), 1, "secret").send_files(wire, make_plan(tmp_path / "there"), {})
    node = make_node()
    for message in wire.sent[:-1]:
        node.take(message, tmp_path / "here", 2)
    assert {path.name: path.stat().st_size for path in (tmp_path / "here").glob("ranks/1/*")} == {
        "suspended": 0,
        "output.log": 2 * CHUNK_BYTES + 1,
        "pid": 3,
    }


def test_reports_of_all_torchrun_agents_are_merged(tmp_path):
    coordinator = Coordinator({"run_dir": str(tmp_path), "world_size": 4}, "secret")
    for number, report in enumerate(
        ({"failures": [{"rank": 1, "exit_code": 3}], "running": [0]}, {"failures": [], "running": [2, 3]}, None)
    ):
        coordinator.nodes[number] = make_node(number)
        if report is not None:
            write(tmp_path, f"nodes/{number}/agent.json", 0)
            write_json(tmp_path / f"nodes/{number}/agent.json", report)
    coordinator.keep_failures()
    assert json.loads((tmp_path / "agent.json").read_text()) == {
        "failures": [{"rank": 1, "exit_code": 3}],
        "running": [0, 2, 3],
    }


@pytest.fixture
def closed_endpoint() -> Iterator[str]:
    """Provide an endpoint that refuses connections: its port is taken, so no other program listens there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_agent_names_the_endpoint_that_does_not_answer(monkeypatch, capsys, closed_endpoint):
    monkeypatch.setenv(variables.AGENT_TOKEN, "secret")
    assert cli.main(["agent", f"--connect={closed_endpoint}", "--node-rank=1"]) == 1
    assert f"node 0 can't be reached at {closed_endpoint}" in capsys.readouterr().err


def test_agent_without_a_token_reports_the_variable(monkeypatch, capsys):
    monkeypatch.delenv(variables.AGENT_TOKEN, raising=False)
    assert cli.main(["agent", "--connect=127.0.0.1:1", "--node-rank=1"]) == 1
    assert (
        f"{variables.AGENT_TOKEN} is not set: a launcher has to hand on node 0's environment" in capsys.readouterr().err
    )


def test_endpoint_without_a_port_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv(variables.AGENT_TOKEN, "secret")
    assert cli.main(["agent", "--connect=node0", "--node-rank=1"]) == 2
    assert "--connect: got 'node0' without a port, allowed is HOST:PORT" in capsys.readouterr().err


def test_invalid_endpoint_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv(variables.AGENT_TOKEN, "secret")
    with pytest.raises(SystemExit) as caught:
        cli.main(["agent", "--connect=a b:1", "--node-rank=1"])
    assert caught.value.code == 2
    assert "allowed is HOST or HOST:PORT" in capsys.readouterr().err


def test_waiting_agent_ends_when_no_launch_comes(monkeypatch, closed_endpoint):
    monkeypatch.setenv(variables.AGENT_TOKEN, "secret")
    monkeypatch.setattr("pytest_aorta.cli.agent.POLL_S", 0.01)
    assert cli.main(["agent", f"--connect={closed_endpoint}", "--node-rank=1", "--wait", "--idle-timeout=0.05"]) == 0


def test_agent_takes_the_last_message_of_a_closed_connection_even_if_its_own_heartbeat_is_due():
    wire, agent = ClosedWire({"type": "bye"}), Agent(("127.0.0.1", 1), 1, "secret")
    try:
        assert agent.await_message(wire, "bye") == {"type": "bye"}  # type: ignore[arg-type]
        with pytest.raises(WireError, match="the connection was closed"):
            agent.await_message(wire, "bye")  # type: ignore[arg-type]
    finally:
        os.close(wire.event)


def test_source_that_is_deleted_while_sources_are_listed_has_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "PACKAGE_ROOT", tmp_path)
    (tmp_path / "a.py").write_text("")
    without = versions.__wrapped__()
    (tmp_path / "b.py").symlink_to("absent")
    assert versions.__wrapped__() == without
    (tmp_path / "c.py").write_text("")
    assert versions.__wrapped__() != without
