"""Leases on the host's devices and CPU slots, shared by every pytest process of one user.

A resource is a file, which the process that has leased it locks with ``flock``: the kernel releases the lock when the
last process that has the file open dies, so a guard holds it until its ranks are dead. One request at a time is the
next: it has locked the file ``next``, and waits until it can lock all of its resources. So requests can't deadlock, and
small ones do not overtake it. (A test that asks for a second lease while it holds one times out after ``wait_s``.)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.common.files import UnreadableFile, acquired, raised_as, slug
from pytest_aorta.common.model import Model, read_model, to_builtins
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.world import World

# Every lease locks this file, an exclusive one alone; and the file of the next request.
_HOST, _NEXT = "host", "next"
_RESOURCE = ".resource"
_MAX_TEXT = 200
_MAX_FILE_BYTES = 1 << 20
POLL_S = 0.02
# A request that waits for longer says once what it waits for.
SAY_S = 2.0
_REMEDY = f"; {variables.LEASE_DIR} can name another folder, on a disk of this host"
# CPU ranks wait for each other most of the time.
CPU_SLOTS_PER_CORE = 2


@dataclass
class Lease(AbstractContextManager["Lease"]):
    """Resources that no other request gets until every process that has ``fds`` open is dead or has closed them.

    Attributes:
        resources: Names of the resources.
        fds: Descriptors for ``pass_fds`` of a child process, which then also holds the lease; empty once released.
    """

    resources: tuple[str, ...]
    fds: tuple[int, ...]

    def release(self) -> None:
        """Close this process's descriptors; a second call does nothing."""
        fds, self.fds = self.fds, ()
        # LOCK_UN would free the devices of a guard whose ranks still run.
        for fd in fds:
            os.close(fd)

    def __exit__(self, *error: object) -> None:
        """Release the lease."""
        self.release()


class Holder(Model, frozen=True):
    """The holder of a resource.

    Attributes:
        resource: Name of the resource.
        owner: Name of the requesting test, with its process id.
        since: Time of the day at which the resource was leased.
        exclusive: Whether no other lease may exist on this host at the same time.
    """

    resource: str
    owner: str
    since: str
    exclusive: bool

    def __str__(self) -> str:
        """Return the owner with the time."""
        return f"{self.owner}, since {self.since}{', to run alone on this host' if self.exclusive else ''}"


def lease(
    pool: Sequence[str],
    count: int,
    *,
    exclusive: bool,
    wait_s: float,
    folder: Path | None = None,
    owner: str,
    say: Callable[[str], None] | None = None,
) -> Lease:
    """Take ``count`` resources of ``pool``, all or none, when this request is the next and they are free.

    Args:
        pool: Names of the resources to choose from, each once.
        count: Number of resources, at most as many as the pool has.
        exclusive: Whether no other lease may exist on this host at the same time, as timing requires.
        wait_s: Limit of the wait in seconds.
        folder: The lease folder; None for the default folder.
        owner: Name of the test, for messages.
        say: Called once after SAY_S of waiting, with lines that name the holders.

    Raises:
        LeaseError: The resources were not free within ``wait_s``, and the message names the holders; or the lease
            folder can't be used.
    """
    began_s = time.monotonic()
    path, holder = _folder(folder), f"{owner[:_MAX_TEXT]} (pid {os.getpid()})"
    asked = f"{count} of {len(pool)} resources{', to run alone on this host' if exclusive else ''}"
    with raised_as(LeaseError, f"lease folder {path}: ", after=_REMEDY), ExitStack() as line:
        _check(path)
        turn: int | None = None
        while True:
            if turn is None and (turn := _locked(path / _NEXT, fcntl.LOCK_EX, line)) is not None:
                line.callback(os.ftruncate, turn, 0)
                _write(turn, ascii(holder)[1:-1])
            if turn is not None and (taken := _taken(path, pool, count, holder, exclusive=exclusive)):
                return taken
            waited_s = time.monotonic() - began_s
            if waited_s >= (min(SAY_S, wait_s) if say else wait_s):
                held = [one for one in holders(path) if exclusive or one.exclusive or one.resource in pool]
                lines = [f"{', '.join(names)} held by {holder}" for holder, names in _by_holder(held).items()]
                lines += [f"{_named(path / _NEXT)} is next"] if turn is None else []
                text = "\n  ".join(
                    [f"{owner}: waited {wait_s if waited_s >= wait_s else round(waited_s):g} s for {asked}", *lines]
                )
                if waited_s >= wait_s:
                    raise LeaseError(text)
                if say:
                    say(text)
                    say = None
            time.sleep(POLL_S)


def _named(file: Path) -> str:
    """Return the name of the request that has locked a file, which it writes just after."""
    for _ in range(10):
        if name := file.read_text():
            return name
        time.sleep(POLL_S)
    return "another request"


def holders(folder: Path | None = None) -> list[Holder]:
    """Return the holder of each leased resource."""
    files = sorted(_folder(folder).glob(f"*{_RESOURCE}"))
    return [holder for file in files if _is_leased(file) and (holder := _holder(file))]


def _holder(file: Path) -> Holder | None:
    """Return the last holder of a resource; None without one that can be read."""
    with suppress(UnreadableFile):
        return read_model(file, Holder, max_bytes=_MAX_FILE_BYTES, follow_links=False)
    return None


def _by_holder(held: Sequence[Holder]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in held:
        found.setdefault(str(one), []).append(one.resource)
    return found


def _taken(folder: Path, pool: Sequence[str], count: int, owner: str, *, exclusive: bool) -> Lease | None:
    """Return the lease if all that a request asks for can be locked now."""
    fds: dict[str, int] = {}
    with ExitStack() as undo:
        host = _locked(folder / _HOST, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, undo)
        for name in pool if host is not None else ():
            file = folder / f"{slug(name)}{_RESOURCE}"
            if len(fds) < count and (fd := _locked(file, fcntl.LOCK_EX, undo)) is not None:
                fds[name] = fd
        if host is None or len(fds) < count:
            return None
        for name, fd in fds.items():
            _write(fd, json.dumps(to_builtins(Holder(name, owner, time.strftime("%H:%M:%S"), exclusive))))
        undo.pop_all()
        return Lease(tuple(fds), (host, *fds.values()))


def _locked(file: Path, mode: int, undo: ExitStack) -> int | None:
    """Return the open file if its lock can be taken."""
    fd = acquired(file, mode, 0o600)
    if fd is not None:
        undo.callback(os.close, fd)
    return fd


class LeasedWorld:
    """A world whose lease is taken when the world is first requested."""

    def __init__(self, world: World, candidates: Sequence[Device], take: Callable[[Sequence[str], int], Lease]) -> None:
        """Choose among ``candidates``, with :func:`lease` and its keywords as ``take``."""
        self._world = world
        self._candidates = {device.uuid: device for device in candidates}
        self._take = take
        self._lease: Lease | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """Open files that hold the lease, for processes that may outlive this process."""
        return self._lease.fds if self._lease else ()

    def world(self) -> World:
        """Return the world with its leased devices.

        Raises:
            LeaseError: Other processes held the devices for longer than the wait allows; the message names them.
        """
        if self._lease is None:
            on_cpu = self._world.device == "cpu"
            pool = cpu_slots() if on_cpu else tuple(self._candidates)
            self._lease = self._take(pool, min(self._world.ranks_per_node, len(pool)))
            if not on_cpu:
                chosen = tuple(self._candidates[uuid] for uuid in self._lease.resources)
                self._world = replace(self._world, devices=chosen)
        return self._world

    def release(self) -> None:
        """Release the lease; ranks that still run keep holding it."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def cpu_slots() -> tuple[str, ...]:
    """Return the slots that CPU ranks lease: CPU_SLOTS_PER_CORE for each core of this host."""
    return tuple(f"cpu-{number}" for number in range(CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)))


def _folder(folder: Path | None) -> Path:
    """Return the given folder, that named by AORTA_LEASE_DIR, or a folder of this user in /tmp.

    XDG_RUNTIME_DIR and TMPDIR are not used: they differ between a user's processes (a login, cron, CI), which would
    then not see each other's leases. XDG_RUNTIME_DIR is also deleted when the last login ends, even if jobs still run.
    """
    return folder or Path(os.environ.get(variables.LEASE_DIR) or f"/tmp/aorta-{os.geteuid()}")  # noqa: S108 - checked


def _check(path: Path) -> None:
    """Make the folder, and refuse one that other users could change."""
    problem = ""
    if path.is_absolute():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, own = path.lstat(), os.geteuid()
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if path.is_symlink():
            problem = "it is a symbolic link"
        elif (status.st_uid, mode) != (own, 0o700):
            problem = f"owned by user {status.st_uid} with mode {mode:04o}, not by user {own} with 0700"
    else:
        problem = "the path is not absolute"  # processes in different working folders would use different ones
    if problem:
        raise OSError(errno.EINVAL, problem)


def _write(fd: int, text: str) -> None:
    """Replace the content of a file.

    Raises:
        OSError: The text could not be written whole.
    """
    os.ftruncate(fd, 0)
    data = text.encode("ascii")
    if os.pwrite(fd, data, 0) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_leased(file: Path) -> bool:
    """Return whether a process has locked a file."""
    with ExitStack() as closed:
        return _locked(file, fcntl.LOCK_SH, closed) is None
