"""Leases between real processes; threads stand in for processes where only the order matters."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch import leases
from pytest_aorta.launch.leases import Lease, holders, lease
from tests.distributed.processes import await_true
from tests.unit.builders import each_of

POOL = tuple(f"GPU-{number}" for number in range(8))
# Only a wait that hangs reaches this limit.
HANG_S = 60.0

# Takes the lease of the first argument, prints it, and continues at the next line of input; once or repeatedly.
CLIENT = """
import json, sys, time
from pathlib import Path
from pytest_aorta.launch.leases import lease
asked = json.loads(sys.argv[1])
asked["folder"] = Path(asked["folder"])
hold_s = asked.pop("hold_s")
while True:
    with lease(**asked) as got:
        print(json.dumps([got.resources, time.monotonic()]), flush=True)
        time.sleep(hold_s) if hold_s else sys.stdin.readline()
    print(json.dumps(time.monotonic()), flush=True)
    if not hold_s:
        break
"""


class Clients:
    """Processes that take leases, ended after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, count: int, *, hold_s: float = 0, **changes: Any) -> subprocess.Popen[str]:
        asked = {"pool": POOL, "count": count, "exclusive": False, "wait_s": HANG_S, "owner": "a client"}
        asked |= {"folder": str(self.folder), "hold_s": hold_s} | changes
        argv = [sys.executable, "-c", CLIENT, json.dumps(asked)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def holding(self, count: int, **changes: Any) -> subprocess.Popen[str]:
        process = self.start(count, **changes)
        assert process.stdout
        assert json.loads(process.stdout.readline())
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def is_locked(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def clients(folder: Path) -> Iterator[Clients]:
    started = Clients(folder)
    yield started
    started.end()


@pytest.fixture
def ask(folder: Path) -> Callable[..., Lease]:
    def ask(count: int, pool: tuple[str, ...] = POOL, wait_s: float = 0, **changes: Any) -> Lease:
        given: dict[str, Any] = {"exclusive": False, "folder": folder, "owner": "this test"} | changes
        return lease(pool, count, wait_s=wait_s, **given)

    return ask


@pytest.fixture
def waiting(folder: Path, ask: Callable[..., Lease]) -> Iterator[Callable[..., Future[Lease]]]:
    """Request in the background; return when the request is the next."""
    with ThreadPoolExecutor(8) as threads:

        def waiting(*args: Any, **kwargs: Any) -> Future[Lease]:
            future = threads.submit(ask, *args, **{"wait_s": HANG_S} | kwargs)
            await_true(lambda: is_locked(folder / "next") and (folder / "next").read_text())
            return future

        yield waiting


def test_request_that_waits_says_once_who_holds_what_and_since_when(ask, waiting, monkeypatch):
    monkeypatch.setattr(leases, "SAY_S", 0.1)
    said: list[str] = []
    with ask(8, owner="the other test") as held:
        waits = waiting(1, say=said.append)
        await_true(lambda: said)
        time.sleep(0.2)
        since = re.escape(f"the other test (pid {os.getpid()}), since ") + r"\d\d:\d\d:\d\d"
        assert re.search(rf"this test: waited 0 s for 1 of 8 resources\n.*GPU-7 held by .*{since}", *said)
        held.release()
        waits.result().release()
    with ask(8, say=said.append):
        assert len(said) == 1


def test_processes_in_competition_never_overlap(clients):
    """Run five processes that each take 1 of 2 resources ten times."""
    streams = [clients.start(1, pool=POOL[:2], hold_s=0.004) for _ in range(5)]
    taken: list[tuple[float, float, str]] = []
    for stream in streams:
        assert stream.stdout
        for _ in range(10):
            [resource], since_s = json.loads(stream.stdout.readline())
            taken.append((since_s, json.loads(stream.stdout.readline()), resource))
    assert {resource for _, _, resource in taken} == set(POOL[:2])
    for resource in POOL[:2]:
        mine = sorted(entry for entry in taken if entry[2] == resource)
        # The end is recorded after the release.
        assert all(began_s + 0.004 <= next_s for (began_s, _, _), (next_s, _, _) in pairwise(mine))


def test_one_resource_too_few_takes_none(ask, folder):
    with ask(1):
        with pytest.raises(LeaseError):
            ask(8)
        with ask(7):
            assert len(holders(folder)) == 8
    assert holders(folder) == []


def test_end_of_wait_names_holders_and_leaves_nothing(clients, ask, folder):
    client = clients.holding(7, owner="tests/a.py::test_big")
    began_s = time.monotonic()
    with pytest.raises(LeaseError) as caught:
        ask(2, wait_s=0.3)
    assert 0.3 <= time.monotonic() - began_s < HANG_S
    text = str(caught.value)
    assert re.match(r"this test: waited 0.3 s for 2 of 8 resources\n", text)
    assert f"GPU-5, GPU-6 held by tests/a.py::test_big (pid {client.pid}), since " in text
    assert {holder.owner for holder in holders(folder)} == {f"tests/a.py::test_big (pid {client.pid})"}
    assert not is_locked(folder / "next")


def test_killed_waiter_blocks_no_other_request(clients, ask, folder):
    with ask(1):
        client = clients.start(8)
        await_true(lambda: is_locked(folder / "next"))
        client.kill()
        client.wait()
        ask(7).release()


def test_lease_lasts_while_a_child_with_the_descriptors_lives(ask):
    got = ask(8)
    with subprocess.Popen(["sleep", "60"], pass_fds=got.fds) as child:
        got.release()
        try:
            with pytest.raises(LeaseError, match="held by this test"):
                ask(1)
        finally:
            child.kill()
    ask(8).release()


def test_refused_request_leaves_no_open_descriptor(ask):
    with ask(8):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(LeaseError):
            ask(1)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_exclusive_request_waits_for_every_other_pool(clients, ask):
    clients.holding(1, pool=["cpu-0"], owner="a side test")
    with pytest.raises(LeaseError, match=r"1 of 8 resources, to run alone on this host\n  cpu-0 held by a side test"):
        ask(1, exclusive=True)


def test_no_other_request_is_served_beside_an_exclusive_lease(clients, ask):
    clients.holding(1, pool=["cpu-0"], exclusive=True)
    with pytest.raises(LeaseError, match=r"to run alone on this host$"):
        ask(1)


@each_of("big", {"all": {"count": 8}, "exclusive": {"count": 1, "exclusive": True}})
def test_small_request_waits_behind_one_that_waits_for_the_whole_host(ask, waiting, big):
    held = ask(1)
    future = waiting(**big, owner="the big one")
    with pytest.raises(LeaseError, match=r"\n  the big one \(pid \d+\) is next"):
        ask(1)
    held.release()
    future.result().release()
    ask(1).release()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/link", "link: it is a symbolic link; AORTA_LEASE_DIR"),
        ("{}/0o777", r"mode 0777, not by user \d+ with 0700"),
        ("{}/0o750", r"mode 0750, not by user \d+ with 0700"),
        ("{}/0o500", r"mode 0500, not by user \d+ with 0700"),
        ("{}/file", "File exists"),
        ("/proc/aorta", "lease folder /proc/aorta: No such file"),
        ("leases", "lease folder leases: the path is not absolute"),
    ],
)
def test_folder_that_is_not_the_users_own_is_refused(tmp_path, ask, name, said):
    for mode in (0o777, 0o750, 0o500):
        (tmp_path / oct(mode)).mkdir()
        (tmp_path / oct(mode)).chmod(mode)
    (tmp_path / "link").symlink_to("0o777")
    (tmp_path / "file").touch()
    with pytest.raises(LeaseError, match=said):
        ask(1, folder=Path(name.format(tmp_path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_refused(tmp_path, ask):
    os.chown(tmp_path, 12345, -1)
    tmp_path.chmod(0o700)
    with pytest.raises(LeaseError, match="owned by user 12345 "):
        ask(1, folder=tmp_path)


def test_symlink_in_the_place_of_a_file_is_not_followed(folder, tmp_path, ask):
    folder.mkdir(mode=0o700)
    (folder / "host").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeaseError, match="symbolic link"):
        ask(1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"version": 1}\n'])
def test_resource_whose_file_is_damaged_is_leased_while_it_is_locked_and_free_after(ask, folder, text):
    with ask(1, POOL[:1]):
        [file] = folder.glob("*.resource")
        file.write_text(text)
        with pytest.raises(LeaseError, match="waited 0 s for 1 of 1 resources"):
            ask(1, POOL[:1])
    ask(1, POOL[:1]).release()
