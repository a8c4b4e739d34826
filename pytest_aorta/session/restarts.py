"""A run of a script that is restarted: its launches, and those of the run straight on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import LaunchError, SpecError
from pytest_aorta.plan.launch_plan import Words
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.bitwise import num_steps
from pytest_aorta.verdict.restarts import AT_END, STEPS

_RECORD = {"warmup": 0, "hash_weights": True, "hash_every_step": True, "hash_state": True}


def restarted_script(
    worlds: Sequence[DistributedWorld],
    script: str | Path,
    args: Sequence[Words],
    settings: Mapping[str, Any],
    after: int,
    restarts: int,
    steps: int | None = None,
) -> tuple[WorkloadResult, list[WorkloadResult]]:
    """Launch a script straight on, and in parts of ``after`` steps, which are ended unless their arguments say so.

    Args:
        worlds: The worlds before and after a restart.
        script: As in :meth:`~pytest_aorta.DistributedWorld.run_script`, with ``settings`` such as ``record``.
        args: Arguments of the script before and after a restart.
        settings: The other arguments of ``run_script``.
        after: Number of steps of each part but the last.
        restarts: Number of restarts.
        steps: Number of all steps, where the arguments have ``{steps}`` in place of the last step of each part.

    Returns:
        The run straight on, and the parts.

    Raises:
        SpecError: An argument is not allowed, or a part was not ended after so many steps.
        LeaseError, LaunchError, ResultError, WorkloadFailed: As in ``run_script``.
    """
    parts = list[WorkloadResult]()

    def launched(number: int, *, is_last: bool) -> WorkloadResult:
        end = str(steps if is_last else after * (number + 1))
        words = [word.replace(STEPS, end) for word in args[number > 0]]
        record = {**_RECORD, **(settings["record"] or {}), "stop_after": 0 if is_last or steps else after}
        return worlds[number > 0].run_script(script, words, **{**settings, "record": record})

    with worlds[0].launcher.one_copy():
        for number in range(restarts + 1):
            try:
                part = launched(number, is_last=number == restarts)
            except LaunchError as error:
                if parts and not any(series.saved for rank in parts[-1].ranks for series in rank.series):
                    error.add_note(
                        f"{script} had not called torch.save before it was ended after {after} steps; {AT_END}"
                    )
                raise
            if number < restarts and num_steps(part) != after:
                raise SpecError(
                    f"compare_restart: {script} made {num_steps(part)} steps by its {'resume_' * (number > 0)}args, "
                    f"where a part has {after}; give arguments for {'as many' if steps else 'more'} steps"
                )
            parts.append(part)
    return launched(0, is_last=True), parts
