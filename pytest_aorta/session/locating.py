"""Further launches that locate what differs, or what is not finite: what they capture, and what that shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from pytest_aorta.common.errors import LaunchError, SpecError
from pytest_aorta.plan.launch_plan import LaunchRequest
from pytest_aorta.plan.reference import Reference
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.bitwise import (
    HASH_OPERATORS_STEP,
    first_difference,
    locate_first,
    locate_non_finite,
    num_steps,
    read_all_operators,
)
from pytest_aorta.verdict.edits import edits
from pytest_aorta.verdict.environment import changed_settings
from pytest_aorta.verdict.metrics import METRICS, Metric
from pytest_aorta.verdict.restarts import lost
from pytest_aorta.verdict.rows import first_other
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, NoteKind, Verdict

if TYPE_CHECKING:
    from pytest_aorta.session.comparing import RunningComparison


# Returns the changes of a request, so that ranks capture what is to be compared.
Capture: TypeAlias = Callable[[LaunchRequest], dict[str, Any]]


def every_step(request: LaunchRequest) -> dict[str, Any]:
    """Return the changes of a request by which a recorded script hashes its weights in every step."""
    return {"record": request.record.replace(hash_every_step=True)} if request.record is not None else {}


def hashes_weights(running: RunningComparison) -> bool:
    """Return whether scripts were launched whose recorded steps hash weights, so that every step can."""
    launches = map(running.launcher.find, running.results.values())
    records = [launch.request.record if launch else None for launch in launches]
    return all(record is not None and record.hash_weights for record in records)


def locate(running: RunningComparison, failing: Sequence[Verdict]) -> None:
    """Enter into a comparison where its failing verdicts come from, by further launches unless these are declined."""
    if running.steps and failing:
        _locate_step(running, failing)
    elif running.locates and (hashed := _hashed_in_script(running, failing)):
        compared = running.comparison
        sides = list(Side) if hashed[0].reference.is_ab else [Side.CANDIDATE]
        try:
            launched = {side: running.again(side, every_step).facts for side in sides}
        except (LaunchError, SpecError) as error:
            notes = (*compared.notes, Note(f"not located, because a launch failed: {error}"))
            running.comparison = compared.replace(notes=notes)
        else:
            here = launched[Side.CANDIDATE]
            there = launched.get(Side.REFERENCE) or max(
                running.old.center_launches if running.old else (),
                key=lambda facts: sum(len(series.weights) for series in facts.series),
            )
            rows = (
                row.replace(detail=_on_weights(METRICS[row.metric], here, there)) if row in hashed else row
                for row in compared.rows
            )
            # The weights before the step that differs first are known now.
            said = [] if any(note.kind is NoteKind.EDIT for note in compared.notes) else edits([here], [there])
            notes = (*(Note(text, NoteKind.EDIT) for text in said), *compared.notes)
            running.comparison = compared.replace(rows=tuple(rows), notes=notes)


def _hashed_in_script(running: RunningComparison, failing: Sequence[Verdict]) -> list[Verdict]:
    if not (running.results[Side.CANDIDATE].ranks[0].series and hashes_weights(running)):
        return []
    hashed = (row for row in failing if row.metric in METRICS and METRICS[row.metric].hashed)
    return [row for row in hashed if row.outcome is Outcome.REGRESSION]


def _on_weights(metric: Metric, here: LaunchFacts, there: LaunchFacts) -> str:
    """Return which tensors that the metric hashes differ first, by launches with the hashes of every step."""
    same = f"with hashes of every step, no {metric.hashed} differ, so launches of the same code differ"
    return first_other(metric, here, there) or f"launched once more {same}"


def _locate_step(running: RunningComparison, failing: Sequence[Verdict]) -> None:
    """Enter into a comparison step by step where the first difference is."""
    launcher, (here, there) = running.launcher, running.results.values()
    different = [row.metric for row in failing if row.outcome is Outcome.REGRESSION]
    difference = first_difference(here, there, running.steps, different)
    if running.stops:
        said = lost(here.facts, there.facts, running.stops, difference, [num_steps(here), num_steps(there)])
        notes = (*running.comparison.notes, *(Note(text, NoteKind.EDIT) for text in said))
        running.comparison = running.comparison.replace(notes=notes)
        return

    def again(result: WorkloadResult, changes: Mapping[str, Any]) -> WorkloadResult:
        side = Side.CANDIDATE if result is here else Side.REFERENCE
        return running.again(side, lambda request: {"config": {**request.config, **changes}})

    shared = here.config.keys() & there.config.keys()
    was, now = changed_settings(*({key: side.config[key] for key in shared} for side in (there, here)))
    found = [f"config: {now}, the reference's {was}"] if now else []
    if difference:
        keys = shared if all(map(launcher.find, (here, there))) else ()
        found += locate_first(here, there, difference, keys, again if running.locates else None, launcher.folder_of)
    workload = " against ".join(dict.fromkeys([here.workload, there.workload]))
    running.comparison = running.comparison.replace(workload=workload, notes=tuple(map(Note, found)))


def locate_not_finite(
    launcher: Launcher, request: LaunchRequest, version: Reference | None, error: LaunchError
) -> list[str]:
    """Return lines on what wrote the first NaN of a failed launch, by launching again; none if this can't be found."""
    step, spec = error.not_finite_step, request.spec
    if step is None:
        return []
    if spec is not None and HASH_OPERATORS_STEP in spec.properties:
        return [*_first_operator(launcher, request, version, step)]
    if not (changes := every_step(request)):
        return []
    error_again, _ = _ended(launcher, replace(request, **changes), version)
    if error_again is None:
        return [f"launched once more, {_FINITE}"]
    headline = str(error_again).partition("\n")[0]
    return [f"launched once more, with a look after every step: {headline}"]


_FINITE = "all values are finite: launches of the same code differ"


def _first_operator(launcher: Launcher, request: LaunchRequest, version: Reference | None, step: int) -> Iterator[str]:
    """Yield lines on the operator that wrote the first NaN.

    A NaN that a gradient has in one step is in the loss only in the next one, often that of another rank.
    """
    for captured in range(step, max(0, step - 2), -1):
        changed = replace(request, config=request.config | {HASH_OPERATORS_STEP: captured})
        error, run_dir = _ended(launcher, changed, version)
        if run_dir is None:
            yield f"step {captured}: not located, because a launch failed: {error}"
            return
        if error is None:
            yield f"step {captured}: launched once more, {_FINITE}"
        line, is_origin = locate_non_finite(read_all_operators(run_dir, launcher.world.size, captured))
        yield f"step {captured}, operators: {line}"
        if is_origin:
            return


def _ended(
    launcher: Launcher, request: LaunchRequest, version: Reference | None
) -> tuple[LaunchError | None, Path | None]:
    """Launch once, and return the error and the run folder, as far as there are any."""
    try:
        return None, launcher.launch(request, version).plan.run_dir
    except LaunchError as error:
        return error, error.run_dir
