"""The plan of the launch around this process, a rank or a child of one; a script may run without a launch."""

import os
from functools import cache
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.folder import PLAN_FILE


def own_plan() -> LaunchPlan | None:
    """Return the plan of this rank's launch; None without a launch."""
    folder = os.environ.get(variables.RANK_FOLDER)
    return _plan_of(folder) if folder else None


@cache
def _plan_of(rank_folder: str) -> LaunchPlan:
    return read_plan(Path(rank_folder).parents[1] / PLAN_FILE)
