"""What the launches of one process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from pytest_aorta.launch.lease.world import LeasedWorld
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.launch.watch import StateLine
from pytest_aorta.plan.gpus import visible_devices
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.reference import References
from pytest_aorta.plan.world import Device, World
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld, Launcher


class Session:
    """What the launches of one process share.

    Attributes:
        line: where the state of a launch under way is shown, if anywhere.
    """

    line: StateLine | None = None

    def __init__(self, options: Options) -> None:
        self.options = options
        self.forkservers = ForkServers()
        self.launcher: Launcher = self.forkservers.launch
        self.references = References(options.ab, options.rootdir)

    @cached_property
    def devices(self) -> list[Device]:
        """The visible GPUs, looked up once and only when needed."""
        return [] if self.options.device == "cpu" else visible_devices()

    def close(self) -> None:
        """End what warm launches were forked from, and remove what was checked out for them."""
        try:
            self.forkservers.close()
        finally:
            self.references.close()

    @contextmanager
    def leased(
        self, world: World, spec: TestSpec, record: TestRecord, run_base: Path, *, timed: bool
    ) -> Iterator[DistributedWorld]:
        """A world of this session's, with launches in folders below ``run_base``; its lease ends with it.

        ``timed`` asks for the host alone, unless the options share it; several nodes are always had alone.
        """
        leased = LeasedWorld(
            world,
            self.devices[: self.options.gpus],
            exclusive=world.nodes > 1 or (timed and not self.options.share_host),
            wait_s=self.options.lease_timeout_s,
            owner=record.nodeid,
        )
        try:
            launcher, references = self.launcher, self.references
            yield DistributedWorld(world, leased, self.options, spec, run_base, record, launcher, references, self.line)
        finally:
            leased.release()
