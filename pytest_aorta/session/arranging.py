"""Launches of a script or a workload with the same samples in other arrangements, and their comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_aorta.common.errors import ComparisonFailed, NothingCompared, SpecError
from pytest_aorta.common.text import brief
from pytest_aorta.plan.workloads import WorkloadSpec, resolve_config
from pytest_aorta.result.first_step import DRAWN, GIVEN, read_first_step
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.comparing import RunningComparison
from pytest_aorta.verdict.arrangements import Arrangement, Side, compare_arrangements
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, NoteKind, Verdicts

if TYPE_CHECKING:
    from pytest_aorta.session.launcher import Launcher


def arrangements(ranks: int, *, has_batch: bool, has_accumulation: bool) -> list[Arrangement]:
    """Return the arrangements of the samples of several ranks: that of the arguments first, the plainest last.

    Without an argument for either, one rank gets the batches that its loader returns one after another as one batch.

    Raises:
        SpecError: There is one rank.
    """
    if ranks == 1:
        raise SpecError("compare_arrangements: the world has 1 rank; needed are 2 or more, as by world(size=2)")
    found = [Arrangement(ranks)]
    found += [Arrangement(1, accumulated=ranks)] if has_accumulation else []
    return found + ([Arrangement(1, batch=ranks)] if has_batch or not has_accumulation else [])


def arranged_args(args: Sequence[str], factors: Mapping[str, int]) -> list[str]:
    """Return the arguments of a script with the number of each of some arguments multiplied by a factor.

    Raises:
        SpecError: An argument has no number to multiply.
    """
    text = "\0".join(args)
    for name, factor in factors.items():
        if not name or factor == 1:
            continue
        found = re.search(rf"(?<![^\0]){re.escape(name)}[=\0](\d+)(?![^\0])", text)
        if found is None:
            raise SpecError(
                f"{name}: the script's arguments {[*args]} have no integer of it; add {name}=N, with the number of one "
                f"rank; a script without it needs parser.add_argument({name!r}, type=int), and has to use that number"
            )
        text = f"{text[: found.start(1)]}{int(found[1]) * factor}{text[found.end(1) :]}"
    return text.split("\0") if args else []


def arranged_config(spec: WorkloadSpec, given: Mapping[str, Any], factors: Mapping[str, int]) -> dict[str, Any]:
    """Return config keys of a workload with the value of each of some keys multiplied by a factor.

    Raises:
        SpecError: The workload lacks a key, or its value is no integer.
    """
    config = resolve_config(spec, given)
    changed: dict[str, Any] = {name: config.get(name) for name in factors}
    if wrong := [name for name, value in changed.items() if not isinstance(value, int)]:
        raise SpecError(
            f"compare_arrangements: {wrong[0]} of {spec.name} is {changed[wrong[0]]!r}, needed is an integer"
        )
    return {**given, **{name: value * factors[name] for name, value in changed.items() if factors[name] > 1}}


def shown(other: Sequence[str] | Mapping[str, Any]) -> str:
    """Return arguments or config keys as words of an arrangement."""
    words = [f"{key} {value}" for key, value in other.items()] if isinstance(other, Mapping) else other
    return brief(" ".join(words), 80)


def judged(
    launcher: Launcher, cases: Sequence[str], launched: Sequence[tuple[Arrangement, WorkloadResult]]
) -> list[Verdicts]:
    """Compare launches with the last of them, and fail the test if any differs.

    Raises:
        ComparisonFailed: As in :meth:`RunningComparison.conclude`.
        ResultError: A launch has kept no first step.
    """
    sides = [_side(launcher, one, result) for one, result in launched]
    (plainest, reference), found = launched[-1], list[Verdicts]()
    eps = max(side.step.eps for side in sides)
    failed = list[ComparisonFailed | NothingCompared]()
    for case, (one, candidate), side in zip(cases, launched[:-1], sides, strict=False):
        running = RunningComparison(launcher, case, candidate, reference)
        running.locates = False
        name = f"{candidate.workload}, {one}, against {plainest},"
        running.comparison = running.comparison.replace(workload=name)
        rows = compare_arrangements(case, side, sides[-1], eps)
        # The first line says what differs; the value counts tensors or samples.
        notes = tuple(Note(row.detail, NoteKind.EDIT) for row in rows if row.outcome is Outcome.REGRESSION)
        try:
            found.append(running.conclude(Verdicts(case, rows, notes)))
        except (ComparisonFailed, NothingCompared) as error:
            failed.append(error)
    if not failed:
        return found
    text, metrics = "\n".join(map(str, failed)), [name for error in failed for name in getattr(error, "metrics", ())]
    raise ComparisonFailed(text, tuple(metrics)) if metrics else NothingCompared(text)


def _side(launcher: Launcher, one: Arrangement, result: WorkloadResult) -> Side:
    step = read_first_step(launcher.launch_of(result).plan.run_dir, range(one.ranks))
    if not (step.samples[GIVEN] or step.samples[DRAWN]):
        # A compiled workload notes the batch of its first step.
        noted = [sample for rank in result.ranks for series in rank.series for sample in series.samples.get("1", ())]
        step.samples[DRAWN].extend(noted)
    reported = (values[0] if values else None for values in (result.loss, result.grad_norm))
    return Side(one, step, *reported)
