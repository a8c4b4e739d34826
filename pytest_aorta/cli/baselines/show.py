"""Text for ``aorta baselines list`` and ``aorta baselines show``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.text import counted, percent, table, wrapped
from pytest_aorta.report.provenance import provenance_pairs
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Direction, Metric, Value, format_value, middle
from pytest_aorta.verdict.noise import blocks, reference_step_ms, transformed_by_revision
from pytest_aorta.verdict.statistics.decision import CONFIDENCE, Scale, quantile_t
from pytest_aorta.verdict.statistics.stored import detectable
from pytest_aorta.verdict.statistics.variance import Estimate, Variance, observed
from pytest_aorta.verdict.verdicts import format_change

# The numbers of candidate launches in the column "detects with": one, and the fewest that can fail a test.
LOOKS = (1, 3)
# The candidate's block, which differs from every block of the baseline.
_ANOTHER_BLOCK = "another"
_HEADLINE = METRICS["step_time_p50"]
_LIST_COLUMNS = (
    "platform", "case", "revision", "center/all", "blocks", "recorded", _HEADLINE.name, "detects with 1, 3",
)  # fmt: skip
_LAUNCH_COLUMNS = (
    "launch", "revision", "center", "recorded", "block", "launcher", "steps", "p50 ms", "p99 ms", "growth",
    "straggler's lag", "canary", "commit", "branch",
)  # fmt: skip
_BORROWED = "* not measured by this baseline yet: taken from the platform's other cases, or from the default"


def list_lines(files: Sequence[StoredFile], width: int) -> list[str]:
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
        str(num_blocks(baseline)),
        recorded_text(baseline),
        format_value(center(_HEADLINE, file), _HEADLINE.unit),
        ", ".join(_detects(estimate, _HEADLINE.scale)) if estimate else "-",
    )


def show_lines(file: StoredFile, width: int) -> list[str]:
    """Return everything that one baseline contains: metrics, launches, config and environment."""
    baseline = file.baseline
    head = [
        baseline.case,
        f"  file: {file.name}",
        f"  platform: {baseline.platform}, workload: {baseline.workload}, test: {baseline.test}",
        f"  {summary_text(baseline)}",
    ]
    forced = [
        f"  revision {revision}: {reason}"
        for revision, reason in sorted(baseline.forced.items(), key=lambda e: int(e[0]))
    ]
    lines = [
        *[part for line in head for part in wrapped(line, width)],
        "metrics:",
        *_metric_lines(file, width),
        "launches:",
        *_launch_lines(baseline, width),
        "provenance of the last launch:",
        *(
            part
            for pair in provenance_pairs(baseline.launches[-1].facts)
            for part in wrapped("  {}: {}".format(*pair), width)
        ),
        "config:",
        *value_lines(baseline.config, width),
        "environment of the last launch:",
        *value_lines(baseline.center_launches[-1].environment, width),
    ]
    return [*lines, "forced:", *(part for line in forced for part in wrapped(line, width))] if forced else lines


def summary_text(baseline: Baseline) -> str:
    """Return the revision, the numbers of launches and session blocks, and the dates of recording."""
    return (
        f"revision {baseline.revision}: {len(baseline.center_launches)} of {counted(len(baseline.launches), 'launch')} "
        f"in the center, {counted(num_blocks(baseline), 'block')}, recorded {recorded_text(baseline)}"
    )


def num_blocks(baseline: Baseline) -> int:
    """Return the number of session blocks of all launches."""
    return len(set(blocks([stored.facts for stored in baseline.launches])))


def recorded_text(baseline: Baseline) -> str:
    """Return the first and the last date of recording."""
    days = sorted(stored.facts.recorded_at[:10] for stored in baseline.launches)
    return f"{days[0]} to {days[-1]}" if days[0] != days[-1] else days[0]


def center(metric: Metric, file: StoredFile) -> Value:
    """Return the value that launches are compared with.

    For a metric without an estimate, return the median of the center launches, or their first value if it is text.
    """
    if estimate := file.estimate(metric):
        return metric.scale.from_transformed(estimate.center, reference_step_ms(file.baseline.center_launches))
    return middle(metric, file.baseline.center_launches)


def uncertainty(estimate: Estimate, scale: Scale) -> float:
    """Return half the width of the center's 95% interval, as a change on ``scale``."""
    error = estimate.uncertainty
    return scale.change(quantile_t((1 + CONFIDENCE) / 2, error.df) * math.sqrt(error.value))


def size(change: float, scale: Scale) -> str:
    """Return a change as text without a sign."""
    return percent(change).replace("%", scale.unit)


def value_lines(values: Mapping[str, object], width: int) -> list[str]:
    """Return one line per value, as JSON."""
    lines = [f"  {key}: {json.dumps(values[key], ensure_ascii=False)}" for key in sorted(values)]
    return [part for line in lines for part in wrapped(line, width)]


def _metric_lines(file: StoredFile, width: int) -> list[str]:
    rows = [_metric_row(metric, file) for metric in METRICS.values() if center(metric, file) is not None]
    looks = ", ".join(map(str, LOOKS))
    head = ("metric", "center", "95%", "within", "between", f"detects with {looks}")
    lines = table([head, *rows], width, indent="  ")
    borrowed = any("*" in cell for row in rows for cell in row[3:5])
    return [*lines, *(wrapped(f"  {_BORROWED}", width) if borrowed else [])]


def _metric_row(metric: Metric, file: StoredFile) -> tuple[str, ...]:
    estimate, is_exact = file.estimate(metric), metric.direction is Direction.EXACT
    shown = format_value(center(metric, file), metric.unit, exact=is_exact)
    if estimate is None:
        different = len({metric.measure(launch) for launch in file.baseline.center_launches})
        note = "equal in all launches" if different == 1 else f"{different} different values"
        return metric.name, shown, "-", "-", "-", note
    own, variance = observed(transformed_by_revision(metric, file.baseline)), estimate.variance
    return (
        metric.name,
        shown,
        f"+-{size(uncertainty(estimate, metric.scale), metric.scale)}",
        _deviation(variance.within, metric.scale, own.slower.df > 0),
        _deviation(variance.between, metric.scale, own.between.df > 0),
        ", ".join(_detects(estimate, metric.scale)),
    )


def _deviation(variance: Variance, scale: Scale, is_own: bool) -> str:
    return size(scale.change(math.sqrt(variance.value)), scale) + ("" if is_own else "*")


def _detects(estimate: Estimate, scale: Scale) -> list[str]:
    relative = scale is Scale.RELATIVE
    return [size(detectable(estimate, _ANOTHER_BLOCK, look, relative=relative), scale) for look in LOOKS]


def _launch_lines(baseline: Baseline, width: int) -> list[str]:
    rows = [
        (str(number), str(stored.revision), "yes" if stored.center else "-", *_launch_cells(stored.facts))
        for number, stored in enumerate(baseline.launches, 1)
    ]
    return table([_LAUNCH_COLUMNS, *rows], width, indent="  ")


def _launch_cells(facts: LaunchFacts) -> tuple[str, ...]:
    lags = facts.rank_lag_ms
    slowest = max(range(len(lags)), key=lags.__getitem__, default=0)
    return (
        facts.recorded_at,
        facts.block,
        facts.launcher,
        str(facts.num_steps),
        f"{facts.step_time_ms['p50']:g}",
        f"{facts.step_time_ms['p99']:g}",
        format_change(facts.step_time_growth),
        f"rank {slowest}: {lags[slowest]:.3g} ms" if lags else "-",
        ", ".join(f"{name.removesuffix('_ms')} {value:.4g} ms" for name, value in facts.canary_ms.items()) or "-",
        facts.version or "-",
        facts.branch or "-",
    )
