"""``aorta baselines``: list, compare and move stored baselines."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pytest_aorta.cli import report_problems
from pytest_aorta.cli.baseline_files import (
    StoredFile,
    file_or_blob,
    move_files,
    planned_moves,
    require_folder,
    stored_files,
)
from pytest_aorta.common.text import counted, emit, output_width, percent, table, wrapped
from pytest_aorta.verdict.baseline import Baseline, locked_baselines
from pytest_aorta.verdict.metrics import METRICS, Direction, Metric, Value, format_value, middle
from pytest_aorta.verdict.noise import blocks, reference_step_ms
from pytest_aorta.verdict.statistics.decision import CONFIDENCE, Scale, quantile_t
from pytest_aorta.verdict.statistics.stored import detectable
from pytest_aorta.verdict.statistics.variance import Estimate
from pytest_aorta.verdict.verdicts import format_change

# The numbers of candidate launches in the column "detects with": one, and the fewest that can fail a test.
LOOKS = (1, 3)
# The candidate's block, which differs from every block of the baseline.
_ANOTHER_BLOCK = "another"
_HEADLINE = METRICS["step_time_p50"]
_LIST_COLUMNS = (
    "platform", "case", "revision", "center/all", "blocks", "recorded", _HEADLINE.name, "detects with 1, 3",
)  # fmt: skip
_DIFF_COLUMNS = ("metric", "A", "B", "change", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--folder", type=Path, default=Path("baselines"), help="folder of the baselines (default: baselines)"
    )
    where.add_argument("--platform", help="only this platform, e.g. nvidia-h200-x8-nccl")
    listed = ways.add_parser("list", parents=[where], help="list all cases, and the changes that each detects")
    listed.set_defaults(run=_list_all)
    compared = ways.add_parser("diff", help="show the differences between two baselines")
    compared.add_argument("first", metavar="A", help="a file, or REF:PATH, a file of a commit")
    compared.add_argument("second", metavar="B", help="the same")
    compared.set_defaults(run=diff)
    moved = ways.add_parser("move", parents=[where], help="move baselines to the new node id of a test")
    moved.add_argument("old", metavar="OLD", help="node id of a test, its file or folder, or a full case")
    moved.add_argument("new", metavar="NEW", help="the same part of the new node id")
    moved.add_argument("--dry-run", action="store_true", help="print what would be moved, and change nothing")
    moved.set_defaults(run=move)


def _list_all(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines list``."""
    files, problems = stored_files(arguments.folder, arguments.platform)
    emit(_list_lines(files, output_width()))
    return report_problems(problems)


def diff(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines diff``."""
    second = file_or_blob(arguments.second)
    first = file_or_blob(arguments.first, second.others)
    emit(diff_lines(first, second, output_width()))
    return 0


def move(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines move``."""
    require_folder(arguments.folder)
    # No session may write between the reading and the writing of files.
    with nullcontext() if arguments.dry_run else locked_baselines(arguments.folder):
        files, problems = stored_files(arguments.folder, arguments.platform)
        if problems:
            problems.append("nothing was moved, since an unreadable file may contain one of the cases")
            return report_problems(problems)
        found = planned_moves(files, arguments.old, arguments.new, arguments.folder)
        if not arguments.dry_run:
            move_files(found, arguments.folder)
    verb = "would be moved" if arguments.dry_run else "moved"
    emit([*map(str, found), f"{len(found)} of {counted(len(files), 'baseline')} {verb}"])
    return 0


def _list_lines(files: Sequence[StoredFile], width: int) -> list[str]:
    """Return a table with one line per case, followed by the totals."""
    rows = [_list_row(file) for file in files]
    lines = table([_LIST_COLUMNS, *rows], width, flexible=1) if rows else []
    launches = [len(file.baseline.launches) for file in files]
    platforms = {file.baseline.platform for file in files}
    return [
        *lines,
        f"{counted(len(files), 'case')} on {counted(len(platforms), 'platform')}, {counted(sum(launches), 'launch')}",
    ]


def _list_row(file: StoredFile) -> tuple[str, ...]:
    baseline = file.baseline
    estimate = file.estimate(_HEADLINE)
    return (
        baseline.platform,
        baseline.case,
        str(baseline.revision),
        f"{len(baseline.center_launches)}/{len(baseline.launches)}",
        str(_num_blocks(baseline)),
        _recorded_text(baseline),
        format_value(_center(_HEADLINE, file), _HEADLINE.unit),
        ", ".join(_detects(estimate, _HEADLINE.scale)) if estimate else "-",
    )


def diff_lines(first: StoredFile, second: StoredFile, width: int) -> list[str]:
    """Return the differences in launches, identity, config and environment, and a table of every metric."""
    lines = [
        *(f"{name}: {file.name}, {_summary_text(file.baseline)}" for name, file in (("A", first), ("B", second))),
        *_named("", _identity(first.baseline), _identity(second.baseline)),
        *_named("config", first.baseline.config, second.baseline.config),
        *_named("environment", _environment(first.baseline), _environment(second.baseline)),
        "metrics:",
    ]
    rows = [_metric_row(metric, first, second) for metric in METRICS.values()]
    there = [row for row in rows if row[1:3] != ("-", "-")]
    wrapped_lines = [part for line in lines for part in wrapped(line, width)]
    return [*wrapped_lines, *table([_DIFF_COLUMNS, *there], width, indent="  "), *_hash_lines(first, second)]


def _summary_text(baseline: Baseline) -> str:
    """Return the revision, the numbers of launches and session blocks, and the dates of recording."""
    return (
        f"revision {baseline.revision}: {len(baseline.center_launches)} of {counted(len(baseline.launches), 'launch')} "
        f"in the center, {counted(_num_blocks(baseline), 'block')}, recorded {_recorded_text(baseline)}"
    )


def _num_blocks(baseline: Baseline) -> int:
    """Return the number of session blocks of all launches."""
    return len(set(blocks([stored.facts for stored in baseline.launches])))


def _recorded_text(baseline: Baseline) -> str:
    """Return the first and the last date of recording."""
    days = sorted(stored.facts.recorded_at[:10] for stored in baseline.launches)
    return f"{days[0]} to {days[-1]}" if days[0] != days[-1] else days[0]


def _center(metric: Metric, file: StoredFile) -> Value:
    """Return the value that launches are compared with.

    For a metric without an estimate, return the median of the center launches, or their first value if it is text.
    """
    if estimate := file.estimate(metric):
        return metric.scale.from_transformed(estimate.center, reference_step_ms(file.baseline.center_launches))
    return middle(metric, file.baseline.center_launches)


def _uncertainty(estimate: Estimate, scale: Scale) -> float:
    """Return half the width of the center's 95% interval, as a change on ``scale``."""
    error = estimate.uncertainty
    return scale.change(quantile_t((1 + CONFIDENCE) / 2, error.df) * math.sqrt(error.value))


def _size(change: float, scale: Scale) -> str:
    """Return a change as text without a sign."""
    return percent(change).replace("%", scale.unit)


def _detects(estimate: Estimate, scale: Scale) -> list[str]:
    return [_size(detectable(estimate, _ANOTHER_BLOCK, look, scale=scale), scale) for look in LOOKS]


def _identity(baseline: Baseline) -> dict[str, Any]:
    return {"case": baseline.case, "platform": baseline.platform, "workload": baseline.workload}


def _environment(baseline: Baseline) -> dict[str, Any]:
    """Return the environment of the center launches; a value that differs between them is a list."""
    facts = [launch.environment | {"launcher": launch.launcher} for launch in baseline.center_launches]
    values = {key: [entry.get(key) for entry in facts] for key in {key for entry in facts for key in entry}}
    return {key: found[0] if found.count(found[0]) == len(found) else found for key, found in values.items()}


def _named(title: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    changed = [key for key in sorted(first.keys() | second.keys()) if _json(first, key) != _json(second, key)]
    if title:
        yield f"{title}: {'' if changed else 'equal'}".rstrip()
    indent = "  " if title else ""
    yield from (f"{indent}{key}: {_json(first, key)} -> {_json(second, key)}" for key in changed)


def _json(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, sort_keys=True) if key in values else "absent"


def _metric_row(metric: Metric, first: StoredFile, second: StoredFile) -> tuple[str, ...]:
    before, after = first.estimate(metric), second.estimate(metric)
    is_exact = metric.direction is Direction.EXACT
    shown = [format_value(_center(metric, file), metric.unit, exact=is_exact) for file in (first, second)]
    if before is None or after is None:
        is_equal = _center_values(metric, first) == _center_values(metric, second)
        return metric.name, *shown, "-", "equal" if is_equal else "differs"
    scale, step_ms = metric.scale, reference_step_ms(first.baseline.center_launches)
    # A change "of a step" refers to the step time of the first baseline.
    there, here = (scale.transform(_center(metric, file), step_ms) or 0.0 for file in (first, second))
    change, errors = here - there, (_uncertainty(before, scale), _uncertainty(after, scale))
    cells = [f"{text} +-{_size(error, scale)}" for text, error in zip(shown, errors, strict=True)]
    judgment = "equal" if change == 0 else _significance(change, errors, scale)
    return metric.name, *cells, format_change(scale.change(change), scale), judgment


def _center_values(metric: Metric, file: StoredFile) -> set[object]:
    return {metric.measure(launch) for launch in file.baseline.center_launches}


def _significance(change: float, errors: tuple[float, float], scale: Scale) -> str:
    beyond = abs(change) > math.hypot(*map(scale.difference, errors))
    return "beyond the uncertainty" if beyond else "within the uncertainty"


def _hash_lines(first: StoredFile, second: StoredFile) -> list[str]:
    """Return a line with the first step whose weight hashes differ, among the steps hashed in both baselines."""
    before, after = (file.baseline.center_launches[-1].weight_hashes for file in (first, second))
    both = sorted(before.keys() & after.keys(), key=int)
    if not both:
        return ["weight hashes: no step has a hash in both"]
    different = next((step for step in both if before[step] != after[step]), None)
    if different is None:
        return [f"weight hashes: equal in {counted(len(both), 'step')} with a hash in both"]
    return [f"weight hashes: differ from step {different} on, {before[different][:12]} -> {after[different][:12]}"]
