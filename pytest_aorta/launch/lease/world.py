"""The leased world of a test, which holds its devices or CPU slots from the first launch to the test's end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.launch.lease.lease import Lease, lease, mark_bad
from pytest_aorta.plan.world import Device, World
from pytest_aorta.result.outcome import LaunchOutcome

# CPU ranks wait for each other most of the time.
CPU_SLOTS_PER_CORE = 2


class LeasedWorld:
    """A world whose lease is taken when the world is first requested.

    With ``exclusive``, no other launch of this user runs on the host during the lease, as timing requires.
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
            count = min(self._world.ranks_per_node, len(pool))
            self._lease = lease(pool, count, exclusive=self._exclusive, wait_s=self._wait_s, owner=self._owner)
            if not on_cpu:
                chosen = tuple(self._candidates[uuid] for uuid in self._lease.resources)
                self._world = replace(self._world, devices=chosen)
        return self._world

    def note(self, outcome: LaunchOutcome) -> None:
        """Mark devices on which a process could not be ended as bad; over several nodes, each node marks its own."""
        if self._world.nodes == 1:
            mark_survivors(self._world, outcome, self._owner)

    def release(self) -> None:
        """Release the lease; ranks that still run keep holding it."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def mark_survivors(world: World, outcome: LaunchOutcome, owner: str) -> None:
    """Mark this host's devices of ``world`` as bad where a process of ``owner`` could not be ended."""
    if outcome.survivors:
        for device in world.devices:
            mark_bad(device.uuid, f"processes {list(outcome.survivors)} of {owner} could not be ended")


def cpu_slots() -> tuple[str, ...]:
    """Return the slots that CPU ranks lease: CPU_SLOTS_PER_CORE for each core of this host."""
    return tuple(f"cpu-{number}" for number in range(CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)))
