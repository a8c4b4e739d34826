"""Launchers: what starts the ranks of a session's plans. The hook ``pytest_aorta_make_launcher`` makes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pytest_aorta.launch.guarded import launch, require_torch
from pytest_aorta.launch.nodes import launch_on_nodes
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.result.outcome import LaunchOutcome


class RankLauncher(Protocol):
    """The interface of a launcher, which starts the ranks of plans, one plan at a time."""

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        """Start the ranks of a plan, wait until none of their processes is left, and return how the launch ended.

        Raises:
            LaunchError: The ranks can't be started.
        """

    def close(self) -> None:
        """Release what is kept from one launch to the next, at the end of the session."""


@dataclass(frozen=True)
class ColdLauncher:
    """The launcher that starts every process of a launch anew, by torchrun on this host or on several nodes."""

    environ: Mapping[str, str]
    run: Callable[[LaunchPlan, Mapping[str, str]], LaunchOutcome] = launch

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        """Run a plan.

        Raises:
            LaunchError: torch is not installed, or as in :func:`pytest_aorta.launch.guarded.launch`.
        """
        if plan.reference is None:
            require_torch()
        return self.run(plan, self.environ)

    def close(self) -> None:
        """Do nothing: nothing is kept."""


def make_launcher(kind: LauncherKind, environ: Mapping[str, str] = os.environ) -> RankLauncher:
    """Return this package's launcher of a kind; launches get their environment from ``environ``."""
    if kind == LauncherKind.FORKSERVER:
        return ForkServers(environ)
    return ColdLauncher(environ, launch_on_nodes if kind == LauncherKind.NODES else launch)


class Launchers(dict[LauncherKind, RankLauncher]):
    """The launchers of a session, each made when the first plan of its kind is launched."""

    def __init__(self, make: Callable[[LauncherKind], RankLauncher] = make_launcher) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: LauncherKind) -> RankLauncher:
        """Make the launcher of a kind."""
        self[kind] = self._make(kind)
        return self[kind]

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        """Launch a plan by the launcher of its kind.

        Raises:
            LaunchError: The ranks can't be started.
        """
        return self[plan.launcher].launch(plan)

    def close(self) -> None:
        """Close every launcher."""
        while self:
            self.popitem()[1].close()
