"""Leases on the host's devices and CPU slots, shared fairly by every pytest process of one user.

Each request is one file, a claim, numbered in order of arrival and locked with ``flock`` by its process: the kernel
frees it when the last process that has it open dies. What a claim was given stands in it, so a claim takes all of its
resources or none, in one write, and nobody ever waits for one lock while holding another: requests can't deadlock. (A
test that asks for a second lease while it holds one gives that up; it waits ``wait_s`` at most.)

Claims are read and written inside one gate, held for about a millisecond or less.
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

from pytest_aorta.launch.lease.queue import MAX_TEXT, Claim, ClaimFolder, LeaseError, append_line, takes_lock

# Later requests served before a waiting one that they compete with. With 0, devices are busy 8% less
# (benchmarks/launch/leases.py); the higher, the longer a large request may wait.
MAX_OVERTAKES = 4
POLL_S = 0.01
# A bad mark is seen this late; all else that can help a waiting request is seen at once.
LOOK_S = 1.0


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
            _wait_for_change(others, min(deadline_s, time.monotonic() + LOOK_S))


def holders(folder: Path | None = None) -> list[Claim]:
    """Who holds something now."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        return [claim for claim in opened.claims().values() if claim.resources]


def bad_marks(folder: Path | None = None) -> dict[str, str]:
    """Why resources are given to nobody."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        return opened.bad()


def mark_bad(resource: str, reason: str, folder: Path | None = None) -> None:
    """Give ``resource`` to nobody until ``clear_bad`` or the host's next start."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        opened.write_bad(opened.bad() | {resource: reason[:MAX_TEXT]})


def clear_bad(resource: str, folder: Path | None = None) -> None:
    """Give ``resource`` out again; does nothing where it is not marked."""
    with ClaimFolder.opened(folder) as opened, opened.gate():
        opened.write_bad({name: reason for name, reason in opened.bad().items() if name != resource})


def _try(folder: ClaimFolder, name: str, fd: int) -> tuple[str, ...]:
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
        append_line(fd, json.dumps(asdict(replace(mine, resources=resources, since_s=time.time()))))
    return resources


def _wait_for_change(others: Mapping[int, int], until_s: float) -> None:
    """Sleep until one of ``others`` is freed or written to, which takes far less CPU time than looking."""
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
