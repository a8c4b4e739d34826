"""Messages and keys of fork servers, and the end of a warm launch; tests/distributed has whole launches."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_aorta.launch.process.channel import close_all, receive, send
from pytest_aorta.launch.process.forkserver import _rank_environment, children
from pytest_aorta.launch.warm import server_key
from pytest_aorta.plan.world import World
from tests.unit.builders import make_plan, replace, run_python


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs


def test_messages_arrive_one_by_one_with_their_file_descriptors(channel):
    ours, theirs = channel
    read_fd, write_fd = os.pipe()
    send(ours, {"request": "launch", "environ": {"TEXT": "line\nline"}}, [write_fd])
    send(ours, {"number": 2})
    message, fds = receive(theirs)
    assert message == {"request": "launch", "environ": {"TEXT": "line\nline"}}
    assert receive(theirs) == ({"number": 2}, [])
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"x")
    assert os.read(read_fd, 1) == b"x"
    close_all([*fds, read_fd, write_fd])


def test_wait_for_a_silent_side_ends_at_the_limit_and_a_closed_side_is_reported(channel):
    ours, theirs = channel
    ours.settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive(ours)
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_LOGS", "PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH"])
def test_variable_that_imports_may_read_needs_another_server(tmp_path, name):
    plan = make_plan(tmp_path)
    assert server_key(plan, {name: "3"}) != server_key(plan, {name: "2"})
    assert server_key(plan, {name: "2"}) != server_key(plan, {})


@pytest.mark.parametrize("name", ["PYTEST_CURRENT_TEST", "NCCL_ALGO", "CUDA_VISIBLE_DEVICES", "RANK"])
def test_variable_that_only_ranks_read_keeps_the_server(tmp_path, name):
    plan = make_plan(tmp_path)
    assert server_key(plan, {name: "1"}) == server_key(plan, {name: "2"}) == server_key(plan, {})


def test_plans_of_one_folder_share_a_server_whatever_their_length_and_size(tmp_path):
    plan = make_plan(tmp_path)
    other = replace(plan, timeout_s=5.0, world=World(3, "cpu"), run_dir=tmp_path / "other")
    assert server_key(plan, {}) == server_key(other, {}) != server_key(replace(plan, cwd=tmp_path / "other"), {})


def test_rank_environment_has_its_number_and_the_rendezvous():
    environment = _rank_environment(2, 4, 12345, "run")
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("2", "2", "4")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "12345")
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_children_are_found_when_a_thread_has_ended_after_the_threads_were_listed(monkeypatch):
    no_thread = "0"
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / no_thread, folder / str(os.getpid())]))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        found = children()
    assert str(child.pid) in found


STOPPED_BETWEEN_WAIT_AND_RECORD = """
import os, signal
from pathlib import Path
from pytest_aorta.launch.process.forkserver import _WarmAgent, fork_apart

ended, running = fork_apart(signal.pause), fork_apart(signal.pause)
os.kill(ended, signal.SIGKILL)
os.waitpid(ended, 0)
agent = _WarmAgent(Path(), 2)
agent.running = {ended: 0, running: 1}
agent.stop()
print(os.path.exists(f"/proc/{running}"))
"""

HOLDING_THE_GIL = """
import faulthandler, itertools, os, signal, time
from pathlib import Path
from pytest_aorta.launch.process import forkserver as warm_agent

def hold(stacks, ready):
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGTERM, print)
    Path("ranks/0").mkdir(parents=True)
    Path("ranks/0/pid").write_text(str(os.getpid()))
    ready.touch()
    sum(itertools.repeat(0))

warm_agent.TERM_S = 0.1
stacks, ready = open("stacks.txt", "w"), Path("ready")
rank = warm_agent.fork_apart(lambda: hold(stacks, ready))
while not ready.exists():
    time.sleep(0.01)
agent = warm_agent._WarmAgent(Path(), 1)
agent.running = {rank: 0}
agent.stop()
print("in hold" in Path("stacks.txt").read_text(), Path(f"/proc/{rank}").exists())
"""


def test_rank_that_holds_the_gil_writes_its_stacks_before_it_is_killed(tmp_path):
    ended = run_python("-c", HOLDING_THE_GIL, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("True False\n", "")


def test_ranks_are_ended_even_if_the_end_of_one_could_not_be_recorded():
    """SIGTERM can arrive after a rank was waited for and before its exit code is recorded."""
    ended = run_python("-c", STOPPED_BETWEEN_WAIT_AND_RECORD)
    assert (ended.stdout, ended.stderr) == ("False\n", "")
