"""A run of a script that is restarted: its launches, and those of the run straight on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.bitwise import num_steps

_RECORD = {"warmup": 0, "hash_weights": True, "hash_every_step": True, "hash_state": True}


def restarted_script(
    worlds: Sequence[DistributedWorld],
    script: str | Path,
    args: Sequence[tuple[str, ...] | list[str]],
    settings: Mapping[str, Any],
    after: int,
    restarts: int,
) -> tuple[WorkloadResult, list[WorkloadResult]]:
    """Launch a script straight on, and in parts that are ended every ``after`` steps.

    Args:
        worlds: The worlds before and after a restart.
        script: As in :meth:`~pytest_aorta.DistributedWorld.run_script`, with ``settings`` such as ``record``.
        args: Arguments of the script before and after a restart.
        settings: Other arguments of ``run_script``.
        after: Number of steps of each part but the last.
        restarts: Number of restarts.

    Returns:
        The run straight on, and the parts.

    Raises:
        SpecError: An argument is not allowed, or a part was not ended after so many steps.
        LeaseError, LaunchError, ResultError, WorkloadFailed: As in ``run_script``.
    """
    settings = {"fresh": (), **settings}
    record, parts = {**_RECORD, **(settings.pop("record", None) or {})}, []
    with worlds[0].launcher.one_copy():
        for number in range(restarts + 1):
            given = record | {"stop_after": after if number < restarts else 0}
            part = worlds[number > 0].run_script(script, args[number > 0], record=given, **settings)
            if number < restarts and num_steps(part) != after:
                raise SpecError(
                    f"compare_restart: {script} made {num_steps(part)} steps by its {'resume_' * (number > 0)}args, "
                    f"where it would be ended after {after}; give arguments for more steps, and leave steps to "
                    f"the optimizer, without the recorder"
                )
            parts.append(part)
    return worlds[0].run_script(script, args[0], record=record, **settings), parts
