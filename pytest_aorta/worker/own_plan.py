"""The folder and the plan of the launch around this process, a rank or a child of one; a script may run without one."""

import os
from functools import cache
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.folder import PLAN_FILE


def own_folder() -> Path | None:
    """Return the folder of this rank's files; None without a launch."""
    folder = os.environ.get(variables.RANK_FOLDER)
    return Path(folder) if folder else None


def own_plan() -> LaunchPlan | None:
    """Return the plan of this rank's launch; None without a launch."""
    folder = own_folder()
    return _plan_of(folder) if folder else None


@cache
def _plan_of(rank_folder: Path) -> LaunchPlan:
    return read_plan(rank_folder.parents[1] / PLAN_FILE)
