"""The hooks that pytest-aorta adds to pytest. Implement them in a ``conftest.py`` or a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_aorta.launch.launchers import RankLauncher
    from pytest_aorta.plan.launch_plan import LaunchPlan
    from pytest_aorta.plan.options import LauncherKind
    from pytest_aorta.session.record import Comparison


@pytest.hookspec
def pytest_aorta_launch(plan: LaunchPlan) -> None:
    """Called before the ranks of each launch start, in the process that runs the test: with xdist, in the worker.

    :param plan: The workload or script, its config, the devices and the run folder. It can't be changed.
    """


@pytest.hookspec(firstresult=True)
def pytest_aorta_make_launcher(config: pytest.Config, kind: LauncherKind) -> RankLauncher | None:
    """Return what starts the ranks of launches of a kind; None leaves it to the next plugin, and at last to this one.

    Called when the first launch of a kind is about to start, in the process that runs the test: with xdist, in each
    worker. The launcher is kept and closed at the end of the run.

    :param kind: ``torchrun`` or ``forkserver``, as ``--aorta-launcher`` and the marker ``world`` choose for a test, and
        ``nodes`` for a test on several nodes.
    """


@pytest.hookspec
def pytest_aorta_comparison(comparison: Comparison) -> None:
    """Called once for each comparison at the end of the run, in the process that owns the terminal, even with xdist.

    Baselines, reports and history have been written. An error that an implementation raises fails the run.

    History, report and Markdown of a run are made from the same comparisons.

    :param comparison: The launches of both sides, what was measured, and the verdicts.
    """
