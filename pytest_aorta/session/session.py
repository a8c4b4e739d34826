"""The state that all launches of one process share, for pytest and for the commands that launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from pytest_aorta.launch.launchers import Launchers, RankLauncher, make_launcher
from pytest_aorta.launch.leases import LeasedWorld, lease
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.options import LauncherKind, Options
from pytest_aorta.plan.reference import References
from pytest_aorta.plan.world import World, WorldSpec
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.search import Bisection
from pytest_aorta.verdict.metrics import NUMBERS, Tolerance

# How long a test waits for devices that other tests hold.
DEVICES_WAIT_S = 1800.0


@dataclass(frozen=True)
class TestSpec:
    """The values that a test's markers set.

    Attributes:
        tolerances: Metric -> the change that a marker allows.
        timeout_s: Time limit of one launch, in seconds; None for the limit of the options.
        measures_overlap: Whether the test measures overlap, which needs the host exclusively.
        compares_numbers: Whether the test is about weights, losses and gradients.
    """

    __test__ = False

    world: WorldSpec = field(default_factory=WorldSpec)
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    timeout_s: float | None = None
    measures_overlap: bool = False
    compares_numbers: bool = False

    @property
    def marked(self) -> dict[str, Tolerance]:
        """Return the tolerances of all metrics that a marker asks for."""
        return (NUMBERS if self.compares_numbers else {}) | self.tolerances


def _speak(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Session:
    """The state that all launches of one process share.

    Attributes:
        options: Options of the run.
        make_launcher: Makes what starts the ranks of plans of a kind.
        line: Shows the state of a running launch; None shows nothing, and commands say it on standard error.
        say: Shows lines to the user during a run, such as what a test waits for.
        bisection: The search for a commit that comparisons are part of; None compares with baselines.
    """

    options: Options
    make_launcher: Callable[[LauncherKind], RankLauncher] = make_launcher
    line: SpokenState | None = None
    say: Callable[[str], None] = _speak
    bisection: Bisection | None = None

    @cached_property
    def launchers(self) -> Launchers:
        """The launchers that were used, each made when first needed."""
        return Launchers(self.make_launcher)

    @cached_property
    def references(self) -> References:
        """The A/B references, each opened when first needed."""
        return References(self.options.ab, self.options.rootdir, self.say)

    @cached_property
    def devices(self) -> list[Device]:
        """The visible GPUs; the driver is asked when they are first needed, and not under ``--aorta-gpus=0``."""
        return [] if self.options.gpus == 0 else visible_devices()

    def close(self) -> None:
        """Close the launchers."""
        self.launchers.close()

    @contextmanager
    def launcher(
        self, world: World, spec: TestSpec, test: RunningTest, run_base: Path, *, timed: bool
    ) -> Iterator[Launcher]:
        """Yield the launcher of a test, whose launches have folders below ``run_base``; release its devices at the end.

        ``timed`` requests exclusive use of the host. Several nodes are always used exclusively.
        """
        is_alone, owner = world.nodes > 1 or timed, test.record.nodeid
        take = partial(lease, exclusive=is_alone, wait_s=DEVICES_WAIT_S, owner=owner, say=self.say)
        leased = LeasedWorld(world, self.devices[: self.options.gpus], take)
        test.record = test.record.replace(platform=world.platform)
        try:
            yield Launcher(self, world, spec, test, leased, run_base)
        finally:
            leased.release()
