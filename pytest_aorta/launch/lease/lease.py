"""Leases on the host's devices and CPU slots, shared fairly by every pytest process of one user.

Each request is a claim: one file, numbered in order of arrival and locked with ``flock`` by the requesting process. The
kernel releases the lock when the last process that has the file open dies. The file also lists the resources that the
claim holds, so one write takes all of them or none. No process waits for one lock while it holds another, so requests
can't deadlock. (A test that asks for a second lease while it holds one times out after ``wait_s``.)

Claims are read and written while holding one lock, the gate, for about a millisecond or less.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch.lease.queue import MAX_TEXT, Claim, ClaimFolder, append_line, takes_lock
from pytest_aorta.launch.sweep import end_processes, pid_namespace, processes_of, start_ticks

# Limit of later competing requests that are served before a waiting request. With 0, devices are busy 8% less
# (benchmarks/launch/leases.py); the higher the limit, the longer a large request may wait.
MAX_OVERTAKES = 4
POLL_S = 0.01
# A guard whose pytest has died ends its launch within 12.5 s.
STOP_S = 20.0
# A waiting request notices a change of bad marks within LOOK_S, and every other change that matters within POLL_S.
LOOK_S = 1.0


class Lease:
    """Resources that no other request gets until every process that has ``fds`` open is dead or has closed them."""

    def __init__(self, resources: tuple[str, ...], fds: tuple[int, ...]) -> None:
        self.resources = resources
        self._fds = fds

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors for ``pass_fds`` of a child process, which then also holds the lease; empty once released."""
        return self._fds

    def release(self) -> None:
        """Close this process's descriptors; a second call does nothing."""
        fds, self._fds = self._fds, ()
        # LOCK_UN would free the devices of a guard whose ranks still run.
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Lease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lease."""
        self.release()


def lease(
    pool: Sequence[str], count: int, *, exclusive: bool, wait_s: float, folder: Path | None = None, owner: str
) -> Lease:
    """Take ``count`` resources of ``pool``, all or none.

    Competing requests are served in order of arrival, except that at most MAX_OVERTAKES later requests are served
    before a request that can't start yet. A freed resource is noticed within POLL_S.

    Args:
        pool: Names of the resources to choose from.
        count: Number of resources.
        exclusive: Whether no other lease may exist on this host at the same time.
        wait_s: Limit of the wait in seconds.
        folder: The lease folder; None for the default folder.
        owner: Name of the test, for messages.

    Raises:
        LeaseError: The pool repeats a resource, or has fewer than ``count`` resources that work; the resources were not
            free within ``wait_s``, and the message names the holders; or the lease folder can't be used.
    """
    pid = os.getpid()
    claim = Claim(
        owner[:MAX_TEXT],
        pid,
        tuple(pool),
        count,
        exclusive,
        pid_namespace=pid_namespace(),
        start_ticks=start_ticks(pid),
    )
    _refuse_impossible(claim)
    deadline_s = time.monotonic() + wait_s
    orphans = Orphans()
    with ClaimFolder.opened(folder) as opened, ExitStack() as undo:
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
            orphans.end(opened)
            _wait_for_change(others, min(deadline_s, time.monotonic() + LOOK_S))


class Orphans:
    """Launches whose pytest is dead. The guard then ends its launch; this class ends launches whose guard can't.

    If the claim of a launch is free, its guard is dead too, and the launch is ended at once. Otherwise the launch is
    ended after ``STOP_S``, since something, such as SIGSTOP, keeps its guard from working.

    Claims of another PID namespace, such as a container's, are left alone: their process ids mean nothing here, and a
    launch there can have the same run folder as a launch here.
    """

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._look_s = 0.0

    def end(self, folder: ClaimFolder) -> None:
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


def holders(folder: Path | None = None) -> list[Claim]:
    """Return the claims that hold resources."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        return [claim for claim in opened.claims().values() if claim.resources]


def bad_marks(folder: Path | None = None) -> dict[str, str]:
    """Return the resources that are marked bad, with the reasons."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        return opened.bad()


def mark_bad(resource: str, reason: str, folder: Path | None = None) -> None:
    """Lease ``resource`` to no request until ``clear_bad`` or the host's next start."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        opened.write_bad(opened.bad() | {resource: reason[:MAX_TEXT]})


def clear_bad(resource: str, folder: Path | None = None) -> None:
    """Make ``resource`` available again; do nothing if the resource is not marked."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        opened.write_bad({name: reason for name, reason in opened.bad().items() if name != resource})


def _try(folder: ClaimFolder, name: str, fd: int) -> tuple[str, ...]:
    """Take the resources of claim ``name`` if the claim's turn has come; return them, or nothing."""
    claims = folder.claims()
    mine, bad = claims.pop(name), folder.bad()
    _refuse_bad(mine, bad)
    held = [claim for claim in claims.values() if claim.resources]
    ahead = _ahead(name, mine, claims)
    # An earlier request that can start takes its resources when it looks next.
    barred = any(other.overtaken >= MAX_OVERTAKES or _choice(other, held, bad) for other in ahead.values())
    resources = () if barred else _choice(mine, held, bad)
    if resources:
        for other in ahead:
            folder.overtake(other)
        append_line(fd, json.dumps(asdict(replace(mine, resources=resources, since_s=time.time()))))
    return resources


def _wait_for_change(others: Mapping[int, int], until_s: float) -> None:
    """Sleep until one of ``others`` is unlocked or written to, which takes far less CPU time than reading claims."""
    try:
        while time.monotonic() < until_s:
            time.sleep(POLL_S)
            if any(takes_lock(fd, fcntl.LOCK_SH) or os.fstat(fd).st_size != size for fd, size in others.items()):
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
    """Return the resources that ``claim`` can take now: all that it asks for, or none."""
    if any(other.exclusive or claim.exclusive for other in held):
        return ()
    taken = {resource for other in held for resource in other.resources}
    free = [resource for resource in claim.pool if resource not in taken and resource not in bad]
    return tuple(free[: claim.count]) if len(free) >= claim.count else ()


def _refuse_impossible(claim: Claim) -> None:
    pool = _listed(claim.pool)
    if len(set(claim.pool)) != len(claim.pool):
        raise LeaseError(f"{claim.owner}: a resource is repeated in the pool {pool}; name each resource once")
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
        f"{claim.count} asked for before by {claim.owner} ({claim.process})"
        for claim in _ahead(name, mine, claims).values()
    ]
    return "\n  ".join([f"{mine.owner}: waited {wait_s:g} s for {asked}", *lines])


def _holder_text(claim: Claim) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(claim.since_s))
    alone = ", with the host alone" if claim.exclusive else ""
    dead = ""
    if claim.is_dead:
        left = processes_of(claim.launches)
        what = f"processes {left} of its launches live" if left else "a process it started lives"
        dead = f", dead, but {what}"
    return f"{claim.owner} ({claim.process}{dead}, since {since}{alone})"


def _listed(resources: Sequence[str]) -> str:
    return ", ".join(name if name.isprintable() and len(name) <= 80 else f"{name[:60]!r}..." for name in resources)
