"""Leases on the host's devices and CPU slots, shared fairly by every pytest process of one user.

Each request is a claim: one file, numbered in order of arrival and locked with ``flock`` by the requesting process. The
kernel releases the lock when the last process that has the file open dies. The file also lists the resources that the
claim holds, so one write takes all of them or none. No process waits for one lock while it holds another, so requests
can't deadlock. (A test that asks for a second lease while it holds one times out after ``wait_s``.)

Claims are read and written while holding one lock, the gate, for about a millisecond or less. A claim's file has a line
for each change: the claim itself, anew when it gets its resources; ``overtaken``; and the begin and end of launches.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.common.files import UnreadableFile, parse_json
from pytest_aorta.common.model import Model, convert, to_builtins
from pytest_aorta.launch.sweep import end_processes, is_alive, pid_namespace, processes_of, start_ticks
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.world import World

GATE = "gate"
OVERTAKEN = "overtaken"
# Lines about a launch on the claim's resources: written before its first process, and after its last process is gone.
LAUNCH, ENDED = "launch ", "ended "
GATE_POLL_S = 0.001
# A gate that stays locked for longer belongs to a stopped process. On a busy machine, or on a virtual machine that is
# moved, a process can be held up for seconds.
GATE_PATIENCE_S = 30.0
MAX_TEXT = 200
MAX_FILE_BYTES = 1 << 20
_CLAIM_NAME = re.compile(r"[0-9]{12}\.claim")
# Limit of later competing requests that are served before a waiting request. With 0, devices are busy 8% less
# (benchmarks/launch/leases.py); the higher the limit, the longer a large request may wait.
MAX_OVERTAKES = 4
POLL_S = 0.01
# A guard whose pytest has died ends its launch within 12.5 s.
STOP_S = 20.0
# A request that waits for longer says once what it waits for.
SAY_S = 2.0
# A waiting request notices a change that matters within POLL_S, and looks for orphans every LOOK_S.
LOOK_S = 1.0
# The last time that every platform can show.
_YEAR_9999_S = 253_370_764_800
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
    """Take ``count`` resources of ``pool``, all or none.

    Competing requests are served in order of arrival, except that at most MAX_OVERTAKES later requests are served
    before a request that can't start yet. A freed resource is noticed within POLL_S.

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
    pid = os.getpid()
    claim = _Claim(owner[:MAX_TEXT], pid, tuple(pool), count, exclusive, pid_namespace(), start_ticks(pid))
    began_s, has_said = time.monotonic(), False
    deadline_s = began_s + wait_s
    orphans = _Orphans()
    with _ClaimFolder.opened(folder) as opened, ExitStack() as undo:
        with opened.gate():
            name, fd = opened.enter(claim, undo)
        while True:
            with opened.gate():
                if resources := _try(opened, name, fd):
                    undo.pop_all()
                    return Lease(resources, (fd,))
                if time.monotonic() >= deadline_s:
                    raise LeaseError(_waited_text(name, opened.claims(), wait_s))
                others = opened.open_others(name)
                waited_s = time.monotonic() - began_s
                text = _waited_text(name, opened.claims(), round(waited_s)) if waited_s >= SAY_S else ""
            if text and say and not has_said:
                say(text)
                has_said = True
            orphans.end(opened)
            _wait_for_change(others, min(deadline_s, time.monotonic() + LOOK_S))


class _Orphans:
    """Launches whose pytest is dead. The guard then ends its launch; this class ends launches whose guard can't.

    If the claim of a launch is free, its guard is dead too, and the launch is ended at once. Otherwise the launch is
    ended after ``STOP_S``, since something, such as SIGSTOP, keeps its guard from working.

    Claims of another PID namespace, such as a container's, are left alone: their process ids mean nothing here, and a
    launch there can have the same run folder as a launch here.
    """

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._look_s = 0.0

    def end(self, folder: _ClaimFolder) -> None:
        """End processes of launches whose time is over; look at most once in ``LOOK_S``."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        with folder.gate():
            claims = folder.claims()
            free = {name for name in folder.orphaned if claims[name].is_local}
        dead = [name for name, claim in claims.items() if claim.run_dirs and claim.is_dead]
        self._seen_s = {name: self._seen_s.get(name, now_s) for name in dead}
        over = free.union(name for name, since_s in self._seen_s.items() if now_s - since_s > STOP_S)
        end_processes([launch for name in over for launch in claims[name].launches])
        self._look_s = time.monotonic() + LOOK_S


def holders(folder: Path | None = None) -> list[_Claim]:
    """Return the claims that hold resources."""
    with _ClaimFolder.opened(folder) as opened, opened.gate():
        return [claim for claim in opened.claims().values() if claim.resources]


def _try(folder: _ClaimFolder, name: str, fd: int) -> tuple[str, ...]:
    """Take the resources of claim ``name`` if the claim's turn has come; return them, or nothing."""
    claims = folder.claims()
    mine = claims.pop(name)
    held = [claim for claim in claims.values() if claim.resources]
    ahead = _ahead(name, mine, claims)
    # An earlier request that can start takes its resources when it looks next.
    barred = any(other.overtaken >= MAX_OVERTAKES or _choice(other, held) for other in ahead.values())
    resources = () if barred else _choice(mine, held)
    if resources:
        for other in ahead:
            folder.overtake(other)
        _append_line(fd, json.dumps(to_builtins(mine.replace(resources=resources, since_s=time.time()))))
    return resources


def _wait_for_change(others: Mapping[int, int], until_s: float) -> None:
    """Sleep until one of ``others`` is unlocked or written to, which takes far less CPU time than reading claims."""
    try:
        while time.monotonic() < until_s:
            time.sleep(POLL_S)
            if any(_takes_lock(fd, fcntl.LOCK_SH) or os.fstat(fd).st_size != size for fd, size in others.items()):
                return
    finally:
        for fd in others:
            os.close(fd)


def _ahead(name: str, mine: _Claim, claims: Mapping[str, _Claim]) -> dict[str, _Claim]:
    return {key: one for key, one in claims.items() if key < name and not one.resources and one.competes_with(mine)}


def _choice(claim: _Claim, held: Sequence[_Claim]) -> tuple[str, ...]:
    """Return the resources that ``claim`` can take now: all that it asks for, or none."""
    if any(other.exclusive or claim.exclusive for other in held):
        return ()
    taken = {resource for other in held for resource in other.resources}
    free = [resource for resource in claim.pool if resource not in taken]
    return tuple(free[: claim.count]) if len(free) >= claim.count else ()


def _waited_text(name: str, claims: dict[str, _Claim], wait_s: float) -> str:
    mine = claims.pop(name)
    held = [claim for claim in claims.values() if claim.resources and claim.competes_with(mine)]
    asked = f"{mine.count} of {len(mine.pool)} resources" + (" and the host alone" if mine.exclusive else "")
    lines = [f"{_listed(claim.resources)} held by {_holder_text(claim)}" for claim in held]
    lines += [
        f"{claim.count} asked for before by {claim.owner} ({claim.process})"
        for claim in _ahead(name, mine, claims).values()
    ]
    return "\n  ".join([f"{mine.owner}: waited {wait_s:g} s for {asked}", *lines])


def _holder_text(claim: _Claim) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(claim.since_s))
    alone = ", with the host alone" if claim.exclusive else ""
    left = processes_of(claim.launches) if claim.is_dead else []
    what = f"processes {left} of its launches live" if left else "a process it started lives"
    dead = f", dead, but {what}" if claim.is_dead else ""
    return f"{claim.owner} ({claim.process}{dead}, since {since}{alone})"


def _listed(resources: Sequence[str]) -> str:
    return ", ".join(name if name.isprintable() and len(name) <= 80 else f"{name[:60]!r}..." for name in resources)


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


class _Claim(Model, frozen=True):
    """A request and the resources that it holds.

    Attributes:
        owner: Name of the requesting test.
        pid: Process id of the requesting process.
        pool: Names of the resources to choose from.
        count: Number of resources requested.
        exclusive: Whether no other claim may hold resources at the same time.
        pid_namespace: Inode of the PID namespace of ``pid``; 0 if unknown.
        start_ticks: Start time of the requesting process, which distinguishes it from a later one with its ``pid``.
        overtaken: Number of competing requests that came later and were served first.
        resources: Names of the resources held; empty while the claim waits.
        since_s: Unix time in seconds at which the resources were taken.
        run_dirs: Run folders of launches that may still have processes.
    """

    owner: str
    pid: int
    pool: tuple[str, ...]
    count: int
    exclusive: bool
    pid_namespace: int = 0
    start_ticks: int = 0
    overtaken: int = 0
    resources: tuple[str, ...] = ()
    since_s: Annotated[float, Meta(ge=0, le=_YEAR_9999_S)] = 0.0
    run_dirs: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """True if ``/proc`` here shows the requesting process; False if it may be in another PID namespace."""
        return self.pid_namespace != 0 and self.pid_namespace == pid_namespace()

    @property
    def is_dead(self) -> bool:
        """True if the requesting process has ended; False also if that is unknown here."""
        return self.is_local and not (is_alive(self.pid) and start_ticks(self.pid) == self.start_ticks)

    @property
    def process(self) -> str:
        """The requesting process, for messages."""
        is_elsewhere = self.pid_namespace != 0 and not self.is_local
        return f"pid {self.pid}" + (" of another PID namespace" if is_elsewhere else "")

    @property
    def launches(self) -> list[Path]:
        """Run folders as paths."""
        return [Path(run_dir) for run_dir in self.run_dirs]

    def competes_with(self, other: _Claim) -> bool:
        """Return whether either claim could keep the other waiting."""
        return self.exclusive or other.exclusive or not set(self.pool).isdisjoint(other.pool)


def _default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder named by AORTA_LEASE_DIR, or a folder of this user in /tmp.

    XDG_RUNTIME_DIR and TMPDIR are not used: they differ between a user's processes (a login, cron, CI), which would
    then not read each other's claims. XDG_RUNTIME_DIR is also deleted when the last login ends, even if jobs still
    run.
    """
    return Path(environ.get(variables.LEASE_DIR) or f"/tmp/aorta-{os.geteuid()}")  # noqa: S108 - its owner is checked


class _ClaimFolder:
    """The opened and checked lease folder; claims are opened relative to ``fd``, so that nobody can swap the folder.

    Attributes:
        orphaned: Names of claims that no process holds but whose launches still have processes; set by ``claims``.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.orphaned: set[str] = set()

    @classmethod
    @contextmanager
    def opened(cls, folder: Path | None) -> Iterator[_ClaimFolder]:
        """Open ``folder``, or the default folder for None, and create it if it is missing."""
        path = _default_folder() if folder is None else folder
        with ExitStack() as stack:
            try:
                fd = _open_folder(path)
                stack.callback(os.close, fd)
                yield cls(path, fd)
            except OSError as error:
                raise _unusable(path, error.strerror or str(error)) from None

    def open(self, name: str, flags: int = 0) -> int:
        """Return a descriptor of a file in the folder; a symbolic link is refused."""
        return os.open(name, flags | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Hold the gate, under which all claims are read and written."""
        deadline_s = time.monotonic() + GATE_PATIENCE_S
        fd = self.open(GATE, os.O_CREAT)
        try:
            # Cleaners of /tmp delete files that have not been touched for days.
            os.utime(fd)
            while not _takes_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline_s:
                    raise _unusable(
                        self.path, f"its gate was locked for {GATE_PATIENCE_S:g} s, perhaps by a stopped process"
                    )
                time.sleep(GATE_POLL_S)
            yield
        finally:
            # Closing is not enough: a child that another thread has just forked can have the gate open too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def claim_names(self) -> list[str]:
        """Return the names of the claims' files, in order of arrival; files of other names are not claims."""
        return sorted(name for name in os.listdir(self.fd) if _CLAIM_NAME.fullmatch(name))  # noqa: PTH208 - takes no fd

    def enter(self, claim: _Claim, undo: ExitStack) -> tuple[str, int]:
        """Queue ``claim`` behind all others; return its file's name and the descriptor that holds the lock."""
        last = max((int(name.removesuffix(".claim")) for name in self.claim_names()), default=0)
        name = f"{last + 1:012d}.claim"
        fd = self.open(name, os.O_CREAT | os.O_EXCL)
        undo.callback(os.close, fd)
        undo.callback(self.remove, name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _append_line(fd, json.dumps(to_builtins(claim)))
        return name, fd

    def remove(self, name: str) -> None:
        """Delete a claim's file if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def overtake(self, name: str) -> None:
        """Record in a waiting claim that a later claim was served first."""
        # The claim's process may have given up in the meantime.
        with suppress(FileNotFoundError):
            fd = self.open(name)
            try:
                _append_line(fd, OVERTAKEN)
            finally:
                os.close(fd)

    def claims(self) -> dict[str, _Claim]:
        """Return the claims by file name, in order of arrival.

        A claim is deleted once all processes that hold it and all processes of its launches are dead.
        """
        self.orphaned = set()
        found = {name: self._read(name) for name in self.claim_names()}
        return {name: claim for name, claim in found.items() if claim}

    def open_others(self, mine: str) -> dict[int, int]:
        """Return the current size of each other claim that a process holds, by descriptor; the caller closes these."""
        others = {}
        for name in {*self.claim_names()} - {mine} - self.orphaned:
            with suppress(FileNotFoundError):
                fd = self.open(name)
                others[fd] = os.fstat(fd).st_size
        return others

    def _read(self, name: str) -> _Claim | None:
        try:
            fd = self.open(name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            is_free, text = _takes_lock(fd, fcntl.LOCK_SH), file.read(MAX_FILE_BYTES)
        try:
            claim = _parse(text, name)
            if is_free and not (claim and processes_of(claim.launches)):
                self.remove(name)
                return None
            if is_free:
                self.orphaned.add(name)
            return claim
        except UnreadableFile as error:
            if is_free:
                self.remove(name)
                return None
            # A guess could lease a device twice.
            raise _unusable(self.path, f"claim of a living process can't be read: {error}") from None


def _open_folder(path: Path) -> int:
    if not path.is_absolute():
        # Processes in different working folders would use different lease folders.
        raise _unusable(path, "the path is not absolute")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink():
        raise _unusable(path, "it is a symbolic link")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if status.st_uid == os.geteuid() and mode == 0o700:
        return fd
    os.close(fd)
    raise _unusable(path, f"owned by user {status.st_uid} with mode {mode:04o}, not by user {os.geteuid()} with 0700")


def _unusable(path: Path, why: str) -> LeaseError:
    return LeaseError(
        f"lease folder {path}: {why}; {variables.LEASE_DIR} can name another folder, on a disk of this host"
    )


def _parse(data: bytes, name: str) -> _Claim | None:
    """Return the claim in a file's content; None before its first line is whole.

    Raises:
        UnreadableFile: The content is not that of a claim.
    """
    # Leave out text after the last line end: its write has failed, and the writing process withdraws the claim.
    lines = data.decode("utf-8", "replace").split("\n")[:-1]
    if not lines:
        return None
    claim, overtaken, run_dirs = None, 0, dict[str, None]()
    for line in lines:
        if line.startswith(LAUNCH):
            run_dirs[parse_json(line.removeprefix(LAUNCH), name)] = None
        elif line.startswith(ENDED):
            run_dirs.pop(parse_json(line.removeprefix(ENDED), name), None)
        elif line == OVERTAKEN:
            overtaken += 1
        else:
            claim = convert(parse_json(line, name), _Claim, name)
    if claim is None:
        raise UnreadableFile(f"{name}: there is no claim in it")
    return claim.replace(overtaken=overtaken, run_dirs=tuple(run_dirs))


def _append_line(fd: int, line: str) -> None:
    """Write a whole line.

    Raises:
        OSError: The line could not be written whole.
    """
    data = line.encode("ascii") + b"\n"
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def record_launch(fd: int, run_dir: Path) -> None:
    """Record a launch in a claim before the guard starts: its processes may outlive every process that holds the claim.

    Raises:
        OSError: The line could not be written.
    """
    _append_line(fd, LAUNCH + json.dumps(str(run_dir)))


def record_end(fd: int, run_dir: Path) -> None:
    """Record in a claim that no process of a launch is left; otherwise the next request looks for processes."""
    with suppress(OSError):
        _append_line(fd, ENDED + json.dumps(str(run_dir)))


def _takes_lock(fd: int, mode: int) -> bool:
    """Lock without waiting, and return whether the lock was taken."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
