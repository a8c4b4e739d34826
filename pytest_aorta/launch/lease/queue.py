"""The folder in which requests for leases queue: one locked file per claim, read and written under one lock, the gate.

The kernel releases a claim's lock when the last process that has the file open dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.documents import UnreadableFile, parse_json, read_json
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.common.files import write_json
from pytest_aorta.common.schema import violation
from pytest_aorta.launch.sweep import is_alive, pid_namespace, processes_of, start_ticks

GATE = "gate"
BAD = "bad.json"
CLAIM_SUFFIX = ".claim"
OVERTAKEN = "overtaken"
# Lines about a launch on the claim's resources: written before its first process, and after its last process is gone.
LAUNCH, ENDED = "launch ", "ended "
GATE_POLL_S = 0.001
# A gate that stays locked for longer belongs to a stopped process. On a busy machine, or on a virtual machine that is
# moved, a process can be held up for seconds.
GATE_PATIENCE_S = 30.0
MAX_TEXT = 200
MAX_BAD_BYTES = 1 << 20
MAX_CLAIM_BYTES = 1 << 20
MAX_CLAIMS = 10**12 - 1
SCHEMA = "leases.schema.json"
_CLAIM_NAME = re.compile(r"[0-9]{12}" + re.escape(CLAIM_SUFFIX))


@dataclass(frozen=True)
class Claim:
    """A request and the resources that it holds.

    Attributes:
        owner: Name of the requesting test.
        pid: Process id of the requesting process.
        pool: Names of the resources to choose from.
        count: Number of resources requested.
        exclusive: Whether no other claim may hold resources at the same time.
        overtaken: Number of competing requests that came later and were served first.
        resources: Names of the resources held; empty while the claim waits.
        since_s: Unix time in seconds at which the resources were taken.
        run_dirs: Run folders of launches that may still have processes.
        pid_namespace: Inode of the PID namespace of ``pid``; 0 if unknown, as in claims of older versions.
        start_ticks: Start time of the requesting process, which distinguishes it from a later one with its ``pid``.
    """

    owner: str
    pid: int
    pool: tuple[str, ...]
    count: int
    exclusive: bool
    overtaken: int = 0
    resources: tuple[str, ...] = ()
    since_s: float = 0.0
    run_dirs: tuple[str, ...] = ()
    pid_namespace: int = 0
    start_ticks: int = 0

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

    def competes_with(self, other: Claim) -> bool:
        """Return whether either claim could keep the other waiting."""
        return self.exclusive or other.exclusive or not set(self.pool).isdisjoint(other.pool)


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder named by AORTA_LEASE_DIR, or a folder of this user in /tmp.

    XDG_RUNTIME_DIR and TMPDIR are not used: they differ between a user's processes (a login, cron, CI), which would
    then not read each other's claims. XDG_RUNTIME_DIR is also deleted when the last login ends, even if jobs still
    run.
    """
    return Path(environ.get(variables.LEASE_DIR) or f"/tmp/aorta-{os.geteuid()}")  # noqa: S108 - its owner is checked


class ClaimFolder:
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
    def opened(cls, folder: Path | None) -> Iterator[ClaimFolder]:
        """Open ``folder``, or the default folder for None, and create it if it is missing."""
        path = default_folder() if folder is None else folder
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
            while not takes_lock(fd, fcntl.LOCK_EX):
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

    def enter(self, claim: Claim, undo: ExitStack) -> tuple[str, int]:
        """Queue ``claim`` behind all others; return its file's name and the descriptor that holds the lock."""
        last = max((int(name.removesuffix(CLAIM_SUFFIX)) for name in self.claim_names()), default=0)
        if last >= MAX_CLAIMS:
            raise _unusable(
                self.path, f"claim {last} is the last number that a file name has room for; delete its file"
            )
        name = f"{last + 1:012d}{CLAIM_SUFFIX}"
        fd = self.open(name, os.O_CREAT | os.O_EXCL)
        undo.callback(os.close, fd)
        undo.callback(self.remove, name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        append_line(fd, json.dumps(asdict(claim)))
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
                append_line(fd, OVERTAKEN)
            finally:
                os.close(fd)

    def claims(self) -> dict[str, Claim]:
        """Return the claims by file name, in order of arrival.

        A claim is deleted once all processes that hold it and all processes of its launches are dead.
        """
        self.orphaned = set()
        read = ((name, self._read(name)) for name in self.claim_names())
        return {name: claim for name, claim in read if claim}

    def open_others(self, mine: str) -> dict[int, int]:
        """Return the current size of each other claim that a process holds, by descriptor; the caller closes these."""
        others = {}
        for name in self.claim_names():
            if name != mine and name not in self.orphaned:
                with suppress(FileNotFoundError):
                    fd = self.open(name)
                    others[fd] = os.fstat(fd).st_size
        return others

    def _read(self, name: str) -> Claim | None:
        try:
            fd = self.open(name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            is_free, text = takes_lock(fd, fcntl.LOCK_SH), file.read(MAX_CLAIM_BYTES)
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

    def bad(self) -> dict[str, str]:
        """Return the resources marked bad since the host started, with the reasons."""
        path = self.path / BAD
        marks = read_json(path, max_bytes=MAX_BAD_BYTES) if os.path.lexists(path) else None
        if marks is None:
            return {}
        if problem := violation(marks, SCHEMA, "bad"):
            raise _unusable(self.path, f"{BAD}: {problem}; repair the file, or delete it with its marks")
        return dict(marks["reasons"]) if marks["boot"] == _boot_id() else {}

    def write_bad(self, reasons: dict[str, str]) -> None:
        """Replace the marks of bad resources."""
        write_json(self.path / BAD, {"boot": _boot_id(), "reasons": reasons})


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


def _parse(data: bytes, name: str) -> Claim | None:
    """Return the claim in a file's content; None before its first line is whole.

    Raises:
        UnreadableFile: The content is not that of a claim.
    """
    # Leave out text after the last line end: its write has failed, and the writing process withdraws the claim.
    lines = data.decode("utf-8", "replace").split("\n")[:-1]
    if not lines:
        return None
    run_dirs: dict[str, None] = {}
    for line in lines:
        if line.startswith(LAUNCH):
            run_dirs[str(parse_json(line.removeprefix(LAUNCH), name))] = None
        elif line.startswith(ENDED):
            run_dirs.pop(str(parse_json(line.removeprefix(ENDED), name)), None)
    lines = [line for line in lines if not line.startswith((LAUNCH, ENDED))]
    if not lines:
        raise UnreadableFile(f"{name}: launches without a claim before them")
    fields = parse_json(lines[-1] if lines[-1] != OVERTAKEN else lines[0], name)
    if problem := violation(fields, SCHEMA, "claim"):
        raise UnreadableFile(f"{name}: {problem}")
    fields |= {"pool": tuple(fields["pool"]), "resources": tuple(fields["resources"]), "run_dirs": tuple(run_dirs)}
    return replace(Claim(**fields), overtaken=lines.count(OVERTAKEN))


def append_line(fd: int, line: str) -> None:
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
    append_line(fd, LAUNCH + json.dumps(str(run_dir)))


def record_end(fd: int, run_dir: Path) -> None:
    """Record in a claim that no process of a launch is left; otherwise the next request looks for processes."""
    with suppress(OSError):
        append_line(fd, ENDED + json.dumps(str(run_dir)))


def takes_lock(fd: int, mode: int) -> bool:
    """Lock without waiting, and return whether the lock was taken."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
