"""Leases on the host's devices and CPU slots, shared fairly by every pytest process of one user.

Each request is one file, a claim, numbered in order of arrival and locked with ``flock`` by its process: the kernel
frees it when the last process that has it open dies. What a claim was given stands in it, so a claim takes all of its
resources or none, in one write, and nobody ever waits for one lock while holding another: requests can't deadlock. (A
test that asks for a second lease while it holds one gives that up; it waits ``wait_s`` at most.)

Claims are read and written inside one gate, held for about a millisecond or less.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_aorta.errors import AortaError
from pytest_aorta.files import read_json, write_json

FOLDER_VARIABLE = "AORTA_LEASE_DIR"
GATE = "gate"
BAD = "bad.json"
CLAIM_SUFFIX = ".claim"
OVERTAKEN = "overtaken"
# Later requests served before a waiting one that they compete with. With 0, devices are busy 8% less
# (benchmarks/leases.py); the higher, the longer a large request may wait.
MAX_OVERTAKES = 4
POLL_S = 0.01
# A bad mark is seen this late; all else that can help a waiting request is seen at once.
LOOK_S = 1.0
GATE_POLL_S = 0.001
# A gate that stays locked this long belongs to a stopped process.
GATE_PATIENCE_S = 2.0
MAX_TEXT = 200
MAX_BAD_BYTES = 1 << 20


class LeaseError(AortaError):
    """Resources can't be leased: too many asked for, held by others for too long, bad, or the folder can't be used."""


class Lease:
    """Resources that nobody else gets until every process that has ``fds`` open is dead or has closed them."""

    def __init__(self, resources: tuple[str, ...], fds: tuple[int, ...]) -> None:
        self.resources = resources
        self._fds = fds

    @property
    def fds(self) -> tuple[int, ...]:
        """For a child's ``pass_fds``, which then holds the lease too; empty once released."""
        return self._fds

    def release(self) -> None:
        """Give up this process's share; a second call does nothing."""
        fds, self._fds = self._fds, ()
        # Not LOCK_UN: that would free the devices of a guard whose ranks still live.
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Lease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release it."""
        self.release()


@dataclass(frozen=True)
class Claim:
    """A request and what it was given.

    Attributes:
        owner, pid: the test and the process that asked.
        pool, count, exclusive: what for.
        overtaken: competing requests that came later and were served first.
        resources: what it holds; empty while it waits.
        since_s: of the epoch, when it got them.
    """

    owner: str
    pid: int
    pool: tuple[str, ...]
    count: int
    exclusive: bool
    overtaken: int = 0
    resources: tuple[str, ...] = ()
    since_s: float = 0.0

    def competes_with(self, other: Claim) -> bool:
        """Whether either could keep the other waiting."""
        return self.exclusive or other.exclusive or not set(self.pool).isdisjoint(other.pool)


def lease(
    pool: Sequence[str], count: int, *, exclusive: bool, wait_s: float, folder: Path | None = None, owner: str
) -> Lease:
    """Take ``count`` resources of ``pool``, all or none; ``exclusive``: while nobody else holds any on this host.

    Competing requests are served in order of arrival, except that at most MAX_OVERTAKES later ones are served before
    one that can't start yet. Something freed is seen within POLL_S.

    Raises:
        LeaseError: at once where the pool has fewer, or fewer that work; after ``wait_s``, naming the holders; or
            because the folder can't be used.
    """
    claim = Claim(owner[:MAX_TEXT], os.getpid(), tuple(pool), count, exclusive)
    _refuse_impossible(claim)
    deadline_s = time.monotonic() + wait_s
    with _Folder.opened(folder) as opened, ExitStack() as undo:
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
            _wait_for_change(others, min(deadline_s, time.monotonic() + LOOK_S))


def holders(folder: Path | None = None) -> list[Claim]:
    """Who holds something now."""
    with _Folder.opened(folder) as opened, opened.gate():
        return [claim for claim in opened.claims().values() if claim.resources]


def mark_bad(resource: str, reason: str, folder: Path | None = None) -> None:
    """Give ``resource`` to nobody until ``clear_bad`` or the host's next start."""
    with _Folder.opened(folder) as opened, opened.gate():
        opened.write_bad(opened.bad() | {resource: reason[:MAX_TEXT]})


def clear_bad(resource: str, folder: Path | None = None) -> None:
    """Give ``resource`` out again; does nothing where it is not marked."""
    with _Folder.opened(folder) as opened, opened.gate():
        opened.write_bad({name: reason for name, reason in opened.bad().items() if name != resource})


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """AORTA_LEASE_DIR, else a folder of this user in /tmp.

    Neither XDG_RUNTIME_DIR nor TMPDIR counts: a user's processes differ in them (a login, cron, CI) and would not see
    each other's claims, and the former is deleted when the last login ends, with jobs still running.
    """
    return Path(environ.get(FOLDER_VARIABLE) or f"/tmp/aorta-{os.geteuid()}")  # noqa: S108 - its owner is checked


class _Folder:
    """The lease folder, open and checked: claims are reached through ``fd``, so that nobody can swap it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    @contextmanager
    def opened(cls, folder: Path | None) -> Iterator[_Folder]:
        path = default_folder() if folder is None else folder
        with ExitStack() as stack:
            try:
                fd = _open_folder(path)
                stack.callback(os.close, fd)
                yield cls(path, fd)
            except OSError as error:
                raise _unusable(path, error.strerror or str(error)) from None

    def open(self, name: str, flags: int = 0) -> int:
        return os.open(name, flags | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)

    @contextmanager
    def gate(self) -> Iterator[None]:
        deadline_s = time.monotonic() + GATE_PATIENCE_S
        fd = self.open(GATE, os.O_CREAT)
        try:
            # Cleaners of /tmp delete what nobody touched for days.
            os.utime(fd)
            while not _locks(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline_s:
                    raise _unusable(self.path, f"its gate was locked for {GATE_PATIENCE_S:g} s, by a stopped process?")
                time.sleep(GATE_POLL_S)
            yield
        finally:
            # Closing is not enough where another thread has just forked a child, which has the gate open too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def claim_names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.fd) if name.endswith(CLAIM_SUFFIX))  # noqa: PTH208 - takes no fd

    def enter(self, claim: Claim, undo: ExitStack) -> tuple[str, int]:
        """Queue up behind all others: the claim's file and its descriptor, which holds the lock."""
        last = max((int(name.removesuffix(CLAIM_SUFFIX)) for name in self.claim_names()), default=0)
        name = f"{last + 1:012d}{CLAIM_SUFFIX}"
        fd = self.open(name, os.O_CREAT | os.O_EXCL)
        undo.callback(os.close, fd)
        undo.callback(self.remove, name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _append(fd, json.dumps(asdict(claim)))
        return name, fd

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def overtake(self, name: str) -> None:
        # Its process may have given up since.
        with suppress(FileNotFoundError):
            fd = self.open(name)
            try:
                _append(fd, OVERTAKEN)
            finally:
                os.close(fd)

    def claims(self) -> dict[str, Claim]:
        """The claims of the living by file name, in order of arrival; those of the dead are deleted."""
        read = ((name, self._read(name)) for name in self.claim_names())
        return {name: claim for name, claim in read if claim}

    def open_others(self, mine: str) -> dict[int, int]:
        """Descriptors of all other claims with their sizes now; the caller closes them."""
        others = {}
        for name in self.claim_names():
            if name != mine:
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
            if _locks(fd, fcntl.LOCK_SH):
                self.remove(name)
                return None
            text = file.read()
        try:
            return _parse(text)
        except (ValueError, TypeError, KeyError) as error:
            # A guess could give devices out twice.
            raise _unusable(self.path, f"{name} of a living process can't be read: {error!r}") from None

    def bad(self) -> dict[str, str]:
        """Why resources were marked bad since the host started."""
        path = self.path / BAD
        marks = read_json(path, max_bytes=MAX_BAD_BYTES) if path.exists() else None
        return dict(marks["reasons"]) if marks and marks["boot"] == _boot_id() else {}

    def write_bad(self, reasons: dict[str, str]) -> None:
        write_json(self.path / BAD, {"boot": _boot_id(), "reasons": reasons})


def _open_folder(path: Path) -> int:
    if not path.is_absolute():
        # Processes in different working folders would each use another.
        raise _unusable(path, "it is not an absolute path")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink():
        raise _unusable(path, "it is a symbolic link")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if status.st_uid == os.geteuid() and mode == 0o700:
        return fd
    os.close(fd)
    raise _unusable(path, f"it is user {status.st_uid}'s with mode {mode:04o}, not user {os.geteuid()}'s with 0700")


def _unusable(path: Path, why: str) -> LeaseError:
    return LeaseError(f"lease folder {path}: {why}; {FOLDER_VARIABLE} may name another one, on a disk of this host")


def _parse(text: bytes) -> Claim | None:
    # What follows the last line end is a write that failed: its process withdraws the claim.
    lines = text.decode("ascii").split("\n")[:-1]
    if not lines:
        return None
    fields = json.loads(lines[-1] if lines[-1] != OVERTAKEN else lines[0])
    fields |= {"pool": tuple(fields["pool"]), "resources": tuple(fields["resources"])}
    return replace(Claim(**fields), overtaken=lines.count(OVERTAKEN))


def _try(folder: _Folder, name: str, fd: int) -> tuple[str, ...]:
    """Take what claim ``name`` asks for if it is its turn; else nothing."""
    claims = folder.claims()
    mine, bad = claims.pop(name), folder.bad()
    _refuse_bad(mine, bad)
    held = [claim for claim in claims.values() if claim.resources]
    ahead = _ahead(name, mine, claims)
    # Whoever came first and can start does so at its own next look.
    barred = any(other.overtaken >= MAX_OVERTAKES or _choice(other, held, bad) for other in ahead.values())
    resources = () if barred else _choice(mine, held, bad)
    if resources:
        for other in ahead:
            folder.overtake(other)
        _append(fd, json.dumps(asdict(replace(mine, resources=resources, since_s=time.time()))))
    return resources


def _wait_for_change(others: Mapping[int, int], until_s: float) -> None:
    """Sleep until one of ``others`` is freed or written to, which takes far less CPU time than looking."""
    try:
        while time.monotonic() < until_s:
            time.sleep(POLL_S)
            if any(_locks(fd, fcntl.LOCK_SH) or os.fstat(fd).st_size != size for fd, size in others.items()):
                return
    finally:
        for fd in others:
            os.close(fd)


def _ahead(name: str, mine: Claim, claims: Mapping[str, Claim]) -> dict[str, Claim]:
    return {
        other: claim
        for other, claim in claims.items()
        if other < name and not claim.resources and claim.competes_with(mine)
    }


def _choice(claim: Claim, held: Sequence[Claim], bad: Collection[str]) -> tuple[str, ...]:
    """What ``claim`` would get now: all it asks for, or nothing."""
    if any(other.exclusive or claim.exclusive for other in held):
        return ()
    taken = {resource for other in held for resource in other.resources}
    free = [resource for resource in claim.pool if resource not in taken and resource not in bad]
    return tuple(free[: claim.count]) if len(free) >= claim.count else ()


def _refuse_impossible(claim: Claim) -> None:
    pool = _listed(claim.pool)
    if len(set(claim.pool)) != len(claim.pool):
        raise LeaseError(f"{claim.owner}: a pool names each resource once; got {pool}")
    if not 1 <= claim.count <= len(claim.pool):
        raise LeaseError(
            f"{claim.owner}: {claim.count} resources asked for; allowed is 1 to {len(claim.pool)} ({pool})"
        )


def _refuse_bad(claim: Claim, bad: Mapping[str, str]) -> None:
    reasons = [f"{_listed([name])} ({bad[name]})" for name in claim.pool if name in bad]
    if len(claim.pool) - len(reasons) < claim.count:
        raise LeaseError(
            f"{claim.owner}: {claim.count} of {len(claim.pool)} resources asked for, and marked bad are "
            f"{', '.join(reasons)}; clear a mark when its resource works again"
        )


def _waited_text(name: str, claims: dict[str, Claim], wait_s: float) -> str:
    mine = claims.pop(name)
    held = [claim for claim in claims.values() if claim.resources and claim.competes_with(mine)]
    asked = f"{mine.count} of {len(mine.pool)} resources" + (" and the host alone" if mine.exclusive else "")
    lines = [f"{_listed(claim.resources)} held by {_holder_text(claim)}" for claim in held]
    lines += [
        f"{claim.count} asked for before by {claim.owner} (pid {claim.pid})"
        for claim in _ahead(name, mine, claims).values()
    ]
    return "\n  ".join([f"{mine.owner}: waited {wait_s:g} s for {asked}", *lines])


def _holder_text(claim: Claim) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(claim.since_s))
    alone = ", with the host alone" if claim.exclusive else ""
    dead = "" if Path(f"/proc/{claim.pid}").exists() else ", dead, but a process it started lives"
    return f"{claim.owner} (pid {claim.pid}{dead}, since {since}{alone})"


def _listed(resources: Sequence[str]) -> str:
    return ", ".join(name if name.isprintable() and len(name) <= 80 else f"{name[:60]!r}..." for name in resources)


def _append(fd: int, line: str) -> None:
    data = line.encode("ascii") + b"\n"
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _locks(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
