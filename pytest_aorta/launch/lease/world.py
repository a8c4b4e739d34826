"""A test's world, leased: the devices (or CPU slots) are its own from its first launch to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.launch.lease.lease import Lease, lease, mark_bad
from pytest_aorta.plan.world import Device, World
from pytest_aorta.result.outcome import LaunchOutcome

# Ranks on CPU wait for each other most of the time.
CPU_SLOTS_PER_CORE = 2


class LeasedWorld:
    """Takes its lease when it is first asked for the world.

    ``exclusive``: nobody else of this user computes on the host meanwhile, which timing needs.
    """

    def __init__(
        self, world: World, candidates: Sequence[Device], *, exclusive: bool, wait_s: float, owner: str
    ) -> None:
        self._world = world
        self._candidates = {device.uuid: device for device in candidates}
        self._exclusive = exclusive
        self._wait_s = wait_s
        self._owner = owner
        self._lease: Lease | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """Open files that hold the lease, for whoever may outlive this process."""
        return self._lease.fds if self._lease else ()

    def world(self) -> World:
        """The world with the devices leased.

        Raises:
            LeaseError: others hold them for longer than the wait allows; the message names them.
        """
        if self._lease is None:
            on_cpu = self._world.device == "cpu"
            pool = cpu_slots() if on_cpu else tuple(self._candidates)
            count = min(self._world.ranks_per_node, len(pool))
            self._lease = lease(pool, count, exclusive=self._exclusive, wait_s=self._wait_s, owner=self._owner)
            if not on_cpu:
                chosen = tuple(self._candidates[uuid] for uuid in self._lease.resources)
                self._world = replace(self._world, devices=chosen)
        return self._world

    def note(self, outcome: LaunchOutcome) -> None:
        """Keep devices from others on which a process could not be ended; over several nodes, each does so itself."""
        if self._world.nodes == 1:
            mark_survivors(self._world, outcome, self._owner)

    def release(self) -> None:
        """Give everything back; ranks that still live keep it."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def mark_survivors(world: World, outcome: LaunchOutcome, owner: str) -> None:
    """Give this host's devices of ``world`` to nobody where a process of ``owner`` could not be ended."""
    if outcome.survivors:
        for device in world.devices:
            mark_bad(device.uuid, f"processes {list(outcome.survivors)} of {owner} could not be ended")


def cpu_slots() -> tuple[str, ...]:
    """What CPU ranks lease: a few slots a core of this host."""
    return tuple(f"cpu-{number}" for number in range(CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)))
