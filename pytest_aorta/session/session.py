"""The state that all launches of one process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.launch.leases import LeasedWorld
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.launch.watch import StateLine
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.options.run import Options
from pytest_aorta.plan.reference import References
from pytest_aorta.plan.world import World
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld, Launcher

MakeRunner: TypeAlias = Callable[[DistributedWorld, Options, TestSpec, TestRecord], WorkloadRunner]


class Session:
    """The state that all launches of one process share.

    Attributes:
        line: Shows the state of a running launch; None shows nothing.
        runner: Makes the object of the ``workload`` fixture.
    """

    line: StateLine | None = None
    runner: MakeRunner = WorkloadRunner

    def __init__(self, options: Options) -> None:
        self.options = options
        self.forkservers = ForkServers()
        self.launcher: Launcher = self.forkservers.launch
        self.references = References(options.ab, options.rootdir)

    @cached_property
    def devices(self) -> list[Device]:
        """Return the visible GPUs. They are looked up once, when first needed."""
        return [] if self.options.device == "cpu" else visible_devices()

    def close(self) -> None:
        """Stop the fork servers of warm launches."""
        self.forkservers.close()

    @contextmanager
    def leased(
        self, world: World, spec: TestSpec, record: TestRecord, run_base: Path, *, timed: bool
    ) -> Iterator[DistributedWorld]:
        """Lease devices and yield a world whose launches have folders below ``run_base``.

        ``timed`` requests exclusive use of the host, unless the options share the host. Several nodes are always used
        exclusively.
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
