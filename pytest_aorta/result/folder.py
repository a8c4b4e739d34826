"""The run folder of a launch: names of its files, and readers of them."""

from __future__ import annotations

from pathlib import Path

from pytest_aorta.plan.launch_plan import LaunchPlan


def rank_folders(plan: LaunchPlan) -> list[Path]:
    """One folder a rank, in order of rank."""
    return [plan.run_dir / "ranks" / str(rank) for rank in range(plan.world.size)]


def steps_entered(folder: Path) -> int:
    """The measured steps that a rank has entered, by the count in its folder; 0 where there is none."""
    try:
        return int.from_bytes((folder / "progress").read_bytes()[:8], "little")
    except OSError:
        return 0
