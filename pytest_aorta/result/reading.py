"""Reads the files that the ranks left and merges them into one result, checked by the schema and across ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.files import write_json_rows
from pytest_aorta.common.schema import violation
from pytest_aorta.common.text import brief
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.workload.adapter import FIRST
from pytest_aorta.result.folder import ARRIVALS_FILE, RESULT_FILE, rank_folders
from pytest_aorta.result.gpu_facts import PlatformFacts
from pytest_aorta.result.measurements import PYTHON_TRACER, SCHEMA_VERSION, WorkloadResult, derived
from pytest_aorta.result.outcome import LaunchOutcome, launch_times_s
from pytest_aorta.result.provenance import provenance
from pytest_aorta.result.trace.arrivals import Arrivals, read_arrivals, waits_of_ranks_ms
from pytest_aorta.result.trace.profiled_steps import StepOverlap

SCHEMA = "workload_result.schema.json"
MAX_RANK_RESULT_BYTES = 16 << 20
MAX_RESULT_BYTES = 512 << 20
MAX_FAILURE_DETAILS = 100
MAX_STEP_MS = 1e12
_REDUCE = ": reduce it over the ranks, e.g. with dist.all_reduce, and record it on every rank"
_LOG_REDUCED = (
    "; log a {} that is reduced over the ranks, or set `ranks: first` in the adapter to read the log of rank 0 alone"
)
_REDUCED = ("loss", "grad_norm")
_BY_NAME = ("rank_metrics", "canary_before", "canary_after")
# The former version that can be read too, the keys that it names differently, and values for the keys that it lacks.
# These values only satisfy the schema, because WorkloadResult computes its own.
_FORMER_VERSION = 2
_RENAMED_SINCE_2 = {"step_times_ms": "rank_step_times_ms", "metrics": "rank_metrics"}
_LACKING_IN_2 = {"executed_iterations": 0, "step_times_ms": [0.0], "metrics": {"step_time_p50": 0.0}}


def collect_result(
    plan: LaunchPlan, outcome: LaunchOutcome, platform_facts: PlatformFacts | None = None
) -> WorkloadResult:
    """Read every rank's file, merge them into ``result.json`` and return the validated result.

    ``platform_facts`` are the readings of the devices' sensors during the launch.

    Raises:
        ResultError: A file is missing, is unreadable or doesn't fit the schema; the ranks contradict each other; or the
            merged file can't be written.
    """
    ranks = [_read_rank(folder / RESULT_FILE) for folder in _measured_folders(plan)]
    _check_ranks(plan, ranks)
    document = merge(plan, outcome, ranks)
    # Replace tuples by lists, so that the result equals the result that is read from the file.
    document["platform_facts"] = json.loads(json.dumps(platform_facts and asdict(platform_facts)))
    path = plan.run_dir / RESULT_FILE
    check_document(path, document)
    try:
        write_json_rows(path, document)
    except OSError as error:
        raise ResultError(f"result {path} can't be written: {error.strerror or error}") from None
    return WorkloadResult.from_json(document)


def read_result(path: Path) -> WorkloadResult:
    """Read a stored ``result.json``, of this schema version or of version 2.

    Raises:
        ResultError: The file is unreadable, of another schema version, or doesn't fit the schema.
    """
    try:
        document = read_json(path, max_bytes=MAX_RESULT_BYTES)
    except UnreadableFile as error:
        raise ResultError(str(error)) from None
    if isinstance(document, dict) and document.get("schema_version") == _FORMER_VERSION:
        document = _upgraded(document)
        _refuse(path, violation(document, SCHEMA) or _impossible(document))
    else:
        check_document(path, document)
    return WorkloadResult.from_json(document)


def _upgraded(document: dict[str, Any]) -> dict[str, Any]:
    renamed = {_RENAMED_SINCE_2.get(key, key): value for key, value in document.items()}
    return renamed | _LACKING_IN_2 | {"schema_version": SCHEMA_VERSION}


def _tracer(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the fact about the first rank that ran under a Python tracer; empty if no rank did."""
    found = (rank["environment"].get(PYTHON_TRACER) for rank in ranks)
    return next(({PYTHON_TRACER: tracer} for tracer in found if tracer), {})


def merge(plan: LaunchPlan, outcome: LaunchOutcome, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one document made of the ranks' documents, which are in order of rank.

    The document gets its provenance here. Nothing adds to the provenance later.
    """
    details = sorted((detail for rank in ranks for detail in rank["failures"]), key=_location)
    first = ranks[0]
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "workload": plan.name,
        "config": plan.config,
        "world_size": plan.world.size,
        "device": plan.world.device,
        "backend": plan.world.backend,
        "platform": plan.world.platform,
        "launcher": outcome.launcher,
        "profiler": plan.profiler,
        "passed": all(rank["passed"] for rank in ranks),
        "failure_count": sum(rank["failure_count"] for rank in ranks),
        "first_failure_iteration": details[0]["iteration"] if details else None,
        "failure_details": details[:MAX_FAILURE_DETAILS],
        "configured_iterations": first["configured_iterations"],
        "total_iterations": first["total_iterations"],
        "main_work_started": all(rank["main_work_started"] for rank in ranks),
        "elapsed_sec": max(rank["elapsed_sec"] for rank in ranks),
        "rank_step_times_ms": [rank["step_times_ms"] for rank in ranks],
        "rank_metrics": {name: [rank["metrics"][name] for rank in ranks] for name in first["metrics"]},
        "weight_hashes": first["weight_hashes"],
        "loss": first["loss"],
        "grad_norm": first.get("grad_norm", []),
        "tensor_hashes": first.get("tensor_hashes", {}),
        "boundary_hashes": _unless_all_empty([rank.get("boundary_hashes", {}) for rank in ranks]),
        "overlap": _unless_all_empty([rank.get("overlap", []) for rank in ranks]),
        "timeline": _unless_all_empty([rank.get("timeline", {}) for rank in ranks]),
        "head_start": [entry for rank in ranks if (entry := rank.get("head_start"))],
        "overlap_as_run": _unless_all_empty([rank.get("overlap_as_run", []) for rank in ranks]),
        "kernels": _unless_all_empty([rank.get("kernels", {}) for rank in ranks]),
        "collectives": _unless_all_empty([rank.get("collectives", []) for rank in ranks]),
        "overlap_problem": first.get("overlap_problem", ""),
        "environment": first["environment"] | _tracer(ranks),
        "launch_times_s": launch_times_s(outcome),
        "wait_ms": _waits_ms(plan, ranks),
        "memory_bytes": [rank["memory_bytes"] for rank in ranks],
        **{name: _by_rank([rank[name] for rank in ranks]) for name in ("canary_before", "canary_after")},
        "provenance": asdict(provenance(plan)),
    }
    return document | derived(document)


def _waits_ms(plan: LaunchPlan, ranks: list[dict[str, Any]]) -> list[list[float]]:
    """Return the waits that the ranks measured, or those that follow from the ranks' arrivals at collectives."""
    measured = [rank["wait_ms"] for rank in ranks]
    # Clocks of several nodes differ by more than a wait.
    if any(measured) or plan.world.nodes > 1:
        return _last_common(measured)
    arrivals = [read_arrivals(folder / ARRIVALS_FILE) for folder in _measured_folders(plan)]
    known = [rank for rank, facts in zip(arrivals, ranks, strict=True) if rank and _steps(rank) == _steps(facts)]
    return waits_of_ranks_ms(known) if len(known) == len(ranks) else measured


def _steps(rank: Arrivals | dict[str, Any]) -> int:
    return len(rank.began_ns) if isinstance(rank, Arrivals) else len(rank["step_times_ms"])


def _last_common(waits_ms: list[list[float]]) -> list[list[float]]:
    """Return the waits of the last steps, as many as every rank has."""
    count = min(map(len, waits_ms))
    return [waits[len(waits) - count :] for waits in waits_ms]


def _by_rank(values: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [rank[name] for rank in values] for name in values[0]}


def _unless_all_empty(values: list[Any]) -> list[Any]:
    return values if any(values) else []


def _measured_folders(plan: LaunchPlan) -> list[Path]:
    """Return the folders of the ranks that have step times: all ranks, or rank 0 if only rank 0 logs."""
    folders = rank_folders(plan.run_dir, plan.world.size)
    adapter = plan.adapter(0)
    return folders[:1] if adapter and adapter.ranks == FIRST else folders


def _location(detail: dict[str, Any]) -> tuple[int, int, int]:
    layer = detail["layer"]
    return detail["iteration"], -1 if layer is None else layer, detail["rank"]


def _read_rank(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, max_bytes=MAX_RANK_RESULT_BYTES, follow_links=False)
    except UnreadableFile as error:
        raise ResultError(f"result invalid: {error}") from None
    if problem := violation(document, SCHEMA, "rank_result"):
        raise ResultError(f"result invalid: {path}: {problem}")
    rank: dict[str, Any] = document
    if rank["passed"] != (rank["failure_count"] == 0):
        raise ResultError(
            f"result invalid: {path}: passed is {rank['passed']} with failure_count {rank['failure_count']}"
        )
    if (
        rank["total_iterations"] != rank["configured_iterations"]
        or len(rank["step_times_ms"]) != rank["total_iterations"]
    ):
        raise ResultError(
            f"result invalid: {path}: {rank['configured_iterations']} iterations configured, "
            f"{rank['total_iterations']} done, {len(rank['step_times_ms'])} step times; they have to be equal"
        )
    if len(rank["wait_ms"]) > rank["total_iterations"]:
        raise ResultError(
            f"result invalid: {path}: wait_ms has {len(rank['wait_ms'])} entries for {rank['total_iterations']} steps; "
            f"allowed is at most one per step"
        )
    for name in ("loss", "grad_norm"):
        if len(values := rank.get(name, [])) not in (0, rank["total_iterations"]):
            raise ResultError(
                f"result invalid: {path}: {name} has {len(values)} values for {rank['total_iterations']} measured "
                f"steps; record it after every step, as recorder.{name}(value) does, or never"
            )
    for kind, hashes in {**rank.get("tensor_hashes", {}), **rank.get("boundary_hashes", {})}.items():
        _check_hashes(path, kind, hashes)
    for number, step in enumerate(rank.get("overlap", [])):
        if problem := StepOverlap.from_json(step).broken_rule():
            raise ResultError(f"result invalid: {path}: overlap of profiled step {number}: {problem}")
    return rank


def _check_hashes(path: Path, kind: str, hashes: dict[str, Any]) -> None:
    """Raise ResultError unless every name has a shape and a hash in every step."""
    counts = {"shapes": len(hashes["shapes"])} | {f"step {step}": len(row) for step, row in hashes["steps"].items()}
    for what, count in counts.items():
        if count != len(hashes["names"]):
            raise ResultError(
                f"result invalid: {path}: hashes of {kind}: {len(hashes['names'])} names, {count} entries of {what}; "
                f"they have to be equal"
            )


def _check_ranks(plan: LaunchPlan, ranks: list[dict[str, Any]]) -> None:
    """Raise ResultError unless the facts that all ranks must agree on, such as loss and weight hashes, are equal."""
    views: dict[str, Callable[[dict[str, Any]], Any]] = {
        "number of step times": lambda rank: len(rank["step_times_ms"]),
        "metrics": lambda rank: sorted(rank["metrics"]),
        "weight_hashes": lambda rank: rank["weight_hashes"],
        "loss": lambda rank: rank["loss"],
        "canary_before": lambda rank: sorted(rank["canary_before"]),
        "canary_after": lambda rank: sorted(rank["canary_after"]),
        "grad_norm": lambda rank: rank.get("grad_norm", []),
        "tensor_hashes": lambda rank: rank.get("tensor_hashes", {}),
        "number of profiled steps": lambda rank: len(rank.get("overlap", [])),
        "overlap_problem": lambda rank: rank.get("overlap_problem", ""),
    }
    for name, view in views.items():
        expected = view(ranks[0])
        for number, rank in enumerate(ranks):
            if view(rank) != expected:
                raise ResultError(
                    f"result invalid: {plan.run_dir}: {name} of rank {number} is {brief(repr(view(rank)), 120)}, "
                    f"of rank 0 {brief(repr(expected), 120)}; they have to be equal{_remedy(plan, name)}"
                )


def _remedy(plan: LaunchPlan, name: str) -> str:
    if name not in _REDUCED:
        return ""
    return _LOG_REDUCED.format(name) if plan.adapter(0) else _REDUCE


def check_document(path: Path, document: Any) -> None:
    """Check that a merged result has this version's schema.

    Raises:
        ResultError: The document has another version or doesn't fit the schema; the message names ``path``.
    """
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultError(
            f"result invalid: {path}: schema_version is {version!r}, this pytest-aorta reads {_FORMER_VERSION} and "
            f"{SCHEMA_VERSION}; run the workload again"
        )
    _refuse(path, violation(document, SCHEMA) or _impossible(document) or _contradiction(document))


def _refuse(path: Path, problem: str | None) -> None:
    if problem:
        raise ResultError(f"result invalid: {path}: {problem}")


def _contradiction(document: dict[str, Any]) -> str | None:
    """Return the problem with the first key whose value does not follow from other keys, or None."""
    for name, expected in derived(document).items():
        if document[name] != expected:
            given, allowed = (brief(json.dumps(value), 120) for value in (document[name], expected))
            return f"$.{name}: got {given}, allowed is {allowed}, which follows from the ranks' values"
    return None


def _impossible(document: dict[str, Any]) -> str | None:
    """Return a problem that a schema can't find, such as lists by rank or by step of unequal lengths, or None."""
    step_times, ranks, key = document["rank_step_times_ms"], document["world_size"], "$.rank_step_times_ms"
    for number, times in enumerate(step_times):
        if len(times) != len(step_times[0]):
            return (
                f"{key}[{number}]: got {len(times)} step times, allowed are {len(step_times[0])}, as many as rank 0 has"
            )
    if (longest := max(map(max, step_times))) > MAX_STEP_MS:
        return f"{key}: got a step of {longest:g} ms, allowed is at most {MAX_STEP_MS:g}"
    if median(map(max, zip(*step_times, strict=True))) <= 0:
        return f"{key}: got a median of 0 ms, allowed is a time above 0; the clock of the steps is too coarse"
    # There is one entry if an adapter reads a log that only rank 0 writes.
    if len(step_times) not in (1, ranks):
        return f"{key}: got {len(step_times)} ranks, allowed is {ranks}, the world_size, or 1"
    by_rank = {name: document[name] for name in ("wait_ms", "memory_bytes")}
    by_rank |= {f"{name}.{key}": values for name in _BY_NAME for key, values in document[name].items()}
    for name, values in by_rank.items():
        if len(values) != len(step_times) and values:
            return (
                f"$.{name}: got entries of {len(values)} ranks, allowed are {len(step_times)}, as in rank_step_times_ms"
            )
    if len({len(waits) for waits in document["wait_ms"]}) > 1:
        return "$.wait_ms: got ranks with different numbers of steps, allowed is one number for all ranks"
    for rank, steps in enumerate(document.get("overlap", [])):
        for number, step in enumerate(steps):
            if problem := StepOverlap.from_json(step).broken_rule():
                return f"$.overlap[{rank}][{number}]: {problem}"
    return None
