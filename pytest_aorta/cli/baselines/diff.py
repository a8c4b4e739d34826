"""``aorta baselines diff``: the differences between two stored baselines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.cli.baselines.show import center, size, summary_text, uncertainty
from pytest_aorta.common.text import counted, table, wrapped
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Direction, Metric, format_value
from pytest_aorta.verdict.noise import reference_step_ms
from pytest_aorta.verdict.statistics.decision import Scale
from pytest_aorta.verdict.verdicts import format_change

_COLUMNS = ("metric", "A", "B", "change", "")


def diff_lines(first: StoredFile, second: StoredFile, width: int) -> list[str]:
    """Return the differences in launches, identity, config and environment, and a table of every metric."""
    lines = [
        *(f"{name}: {file.name}, {summary_text(file.baseline)}" for name, file in (("A", first), ("B", second))),
        *_named("", _identity(first.baseline), _identity(second.baseline)),
        *_named("config", first.baseline.config, second.baseline.config),
        *_named("environment", _environment(first.baseline), _environment(second.baseline)),
        "metrics:",
    ]
    rows = [_metric_row(metric, first, second) for metric in METRICS.values()]
    there = [row for row in rows if row[1:3] != ("-", "-")]
    wrapped_lines = [part for line in lines for part in wrapped(line, width)]
    return [*wrapped_lines, *table([_COLUMNS, *there], width, indent="  "), *_hash_lines(first, second)]


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
    shown = [format_value(center(metric, file), metric.unit, exact=is_exact) for file in (first, second)]
    if before is None or after is None:
        is_equal = _center_values(metric, first) == _center_values(metric, second)
        return metric.name, *shown, "-", "equal" if is_equal else "differs"
    scale, step_ms = metric.scale, reference_step_ms(first.baseline.center_launches)
    # A change "of a step" refers to the step time of the first baseline.
    there, here = (scale.transform(center(metric, file), step_ms) or 0.0 for file in (first, second))
    change, errors = here - there, (uncertainty(before, scale), uncertainty(after, scale))
    cells = [f"{text} +-{size(error, scale)}" for text, error in zip(shown, errors, strict=True)]
    judgment = "equal" if change == 0 else _significance(change, errors, scale)
    return metric.name, *cells, format_change(scale.change(change), scale), judgment


def _center_values(metric: Metric, file: StoredFile) -> set[object]:
    return {metric.measure(launch) for launch in file.baseline.center_launches}


def _significance(change: float, errors: tuple[float, float], scale: Scale) -> str:
    beyond = abs(change) > math.hypot(*map(scale.difference, errors))
    return "beyond the uncertainty" if beyond else "within the uncertainty"


def _hash_lines(first: StoredFile, second: StoredFile) -> list[str]:
    """Return a line with the first step whose weight hashes differ, among the steps hashed in both baselines."""
    before, after = _last_hashes(first.baseline.center_launches), _last_hashes(second.baseline.center_launches)
    both = sorted(before.keys() & after.keys(), key=int)
    if not both:
        return ["weight hashes: no step has a hash in both"]
    different = next((step for step in both if before[step] != after[step]), None)
    if different is None:
        return [f"weight hashes: equal in {counted(len(both), 'step')} with a hash in both"]
    return [f"weight hashes: differ from step {different} on, {before[different][:12]} -> {after[different][:12]}"]


def _last_hashes(center_launches: tuple[LaunchFacts, ...]) -> dict[str, str]:
    return center_launches[-1].weight_hashes
