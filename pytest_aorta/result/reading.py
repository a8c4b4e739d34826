"""Reads the files that the ranks left and keeps them as one result, checked across ranks and by its schema."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.model import read_model, to_builtins, write_json_rows
from pytest_aorta.common.text import brief
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.folder import ARRIVALS_FILE, RESULT_FILE, rank_folders
from pytest_aorta.result.measurements import SCHEMA_VERSION, RankResult, WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.provenance import provenance
from pytest_aorta.result.sensors import PlatformFacts
from pytest_aorta.result.system import system_facts
from pytest_aorta.result.trace.profiled_steps import Profile
from pytest_aorta.result.trace.rank_files import read_arrivals, waits_of_ranks_ms

MAX_RANK_RESULT_BYTES = 16 << 20
MAX_RESULT_BYTES = 512 << 20
_REDUCE = ": reduce it over the ranks, e.g. with dist.all_reduce, and record it on every rank"
# What all ranks have to agree on.
_COMMON: dict[str, Callable[[RankResult], Any]] = {
    "number of step times": lambda rank: len(rank.step_times_ms),
    "metrics": lambda rank: sorted(rank.metrics),
    "weight_hashes": lambda rank: rank.weight_hashes,
    "loss": lambda rank: rank.loss,
    "grad_norm": lambda rank: rank.grad_norm,
    "tensor_hashes": lambda rank: rank.tensor_hashes,
    "number of profiled steps": lambda rank: len(rank.profile.steps),
    "problem of profiled steps": lambda rank: rank.profile.problem,
}


def collect_result(
    plan: LaunchPlan, outcome: LaunchOutcome, platform_facts: PlatformFacts | None = None
) -> WorkloadResult:
    """Read every rank's file, write them as ``result.json`` and return the validated result.

    ``platform_facts`` are the readings of the devices' sensors during the launch.

    Raises:
        ResultError: A file is missing, is unreadable or doesn't fit the schema; the ranks contradict each other; or the
            result can't be written.
    """
    folders = rank_folders(plan.run_dir, plan.world.ranks)
    ranks = _evened([_read_rank(folder / RESULT_FILE) for folder in folders])
    folders = folders[: len(ranks)]
    _refuse(plan.run_dir, _disagreement(ranks) or _impossible(ranks, len(plan.world.ranks)))
    result = WorkloadResult(
        schema_version=SCHEMA_VERSION,
        workload=plan.name,
        config=plan.config,
        world_size=plan.world.size,
        simulated=list(plan.world.simulated),
        device=plan.world.device,
        backend=plan.world.backend,
        platform=plan.world.platform,
        launcher=outcome.launcher,
        profiler=plan.profiler,
        launch_times_s={"wall": outcome.wall_s},
        host=socket.gethostname(),
        provenance=provenance(plan.cwd, plan.command, plan.reference),
        platform_facts=platform_facts,
        system=system_facts(),
        collective_ms=_waits_ms(plan, folders, ranks),
        ranks=ranks,
    )
    path = plan.run_dir / RESULT_FILE
    with raised_as(ResultError, f"result {path} can't be written: "):
        write_json_rows(path, to_builtins(result))
    return result


def read_result(path: Path) -> WorkloadResult:
    """Read a stored ``result.json``.

    Raises:
        ResultError: The file is unreadable, of another schema version, or doesn't fit the schema.
    """
    with raised_as(ResultError, "result invalid: ", after="; if another version wrote it, run the workload again"):
        return read_model(path, WorkloadResult, max_bytes=MAX_RESULT_BYTES, by_hand=False)


def _read_rank(path: Path) -> RankResult:
    with raised_as(ResultError, "result invalid: "):
        rank = read_model(path, RankResult, max_bytes=MAX_RANK_RESULT_BYTES, follow_links=False, by_hand=False)
    _refuse(path, rank.problem())
    return rank


def _evened(ranks: list[RankResult]) -> list[RankResult]:
    """Return the ranks of an unedited script, whose data may be uneven, with the steps that all of them have.

    Where rank 0 alone steps an optimizer, as a learner does among actors, it is returned alone.
    """
    is_observed = [any(one.is_main for one in rank.series) for rank in ranks]
    if is_observed[0] and not any(is_observed[1:]):
        return ranks[:1]
    is_even = len({(len(rank.step_times_ms), len(rank.profile.steps), rank.profile.problem) for rank in ranks}) == 1
    if is_even or not all(is_observed):
        return ranks
    count = min(len(rank.step_times_ms) for rank in ranks)
    shortest = min(ranks, key=lambda rank: sum(series.num_steps for series in rank.series))
    problem = shortest.profile.problem or "ranks ended after different numbers of profiled steps"
    return [
        rank.replace(
            configured_iterations=count,
            total_iterations=count,
            step_times_ms=rank.step_times_ms[:count],
            collective_ms=rank.collective_ms[:count] if len(rank.collective_ms) == len(rank.step_times_ms) else [],
            metrics={name: rank.metrics[name] for name in rank.metrics.keys() - rank.profile.metrics().keys()},
            profile=Profile(problem=problem),
        )
        for rank in ranks
    ]


def _refuse(path: Path, problem: str | None) -> None:
    if problem:
        raise ResultError(f"result invalid: {path}: {problem}")


def _disagreement(ranks: Sequence[RankResult]) -> str | None:
    """Return the first value that has to be equal on all ranks and is not."""
    for name, view in _COMMON.items():
        expected = view(ranks[0])
        for number, rank in enumerate(ranks):
            if (given := view(rank)) != expected:
                remedy = _REDUCE if name in ("loss", "grad_norm") else ""
                return (
                    f"{name} of rank {number} is {brief(repr(given), 120)}, of rank 0 {brief(repr(expected), 120)}; "
                    f"they have to be equal{remedy}"
                )
    return None


def _impossible(ranks: Sequence[RankResult], num_ranks: int) -> str | None:
    # There is one entry if one rank alone steps an optimizer.
    if len(ranks) not in (1, num_ranks):
        return f"got {len(ranks)} ranks, allowed is {num_ranks}, the number of started ranks, or 1"
    if median(map(max, zip(*(rank.step_times_ms for rank in ranks), strict=True))) <= 0:
        return "step_times_ms: got a median of 0 ms, allowed is a time above 0; the clock of the steps is too coarse"
    return None


def _waits_ms(plan: LaunchPlan, folders: Sequence[Path], ranks: Sequence[RankResult]) -> list[list[float]]:
    """Return the waits that the ranks measured, or those that follow from the ranks' arrivals at collectives."""
    measured = [rank.collective_ms for rank in ranks]
    # Clocks of several nodes differ by more than a wait.
    if any(measured) or plan.world.nodes > 1 or plan.world.simulated:
        count = min(map(len, measured))
        return [waits[len(waits) - count :] for waits in measured]
    arrivals = [read_arrivals(folder / ARRIVALS_FILE) for folder in folders]
    known = [
        found
        for found, rank in zip(arrivals, ranks, strict=True)
        if found is not None and len(found.began_ns) == len(rank.step_times_ms)
    ]
    return waits_of_ranks_ms(known) if len(known) == len(ranks) else measured
