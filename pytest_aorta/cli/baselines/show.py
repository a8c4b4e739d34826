"""What stored baselines hold, as text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.text import counted, percent, table, wrapped
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Metric, Value, format_value, middle
from pytest_aorta.verdict.priors import epochs_of, reference_step_ms, sittings
from pytest_aorta.verdict.statistics.decision import CONFIDENCE, detectable, quantile_t
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Level, Variance, observed
from pytest_aorta.verdict.verdicts import format_change

# Launches of the candidate that "detects with" is told for: one, and as many as it takes to fail a test.
LOOKS = (1, 3)
# Of the candidate's: none that the baseline knows.
_ANOTHER_SITTING = "another"
_HEADLINE = METRICS["step_time_p50"]
_LIST_COLUMNS = (
    "platform", "case", "epoch", "anchor/all", "sittings", "recorded", _HEADLINE.name, "detects with 1, 3",
)  # fmt: skip
_LAUNCH_COLUMNS = (
    "launch", "epoch", "anchor", "recorded", "sitting", "launcher", "steps", "p50 ms", "p99 ms", "growth",
    "slow rank's lag", "canary",
)  # fmt: skip
_BORROWED = "* nothing of its own shows it yet: the platform's other cases, or the default, stand in"


def list_lines(files: Sequence[StoredFile], width: int) -> list[str]:
    """One line a case, then the totals."""
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
    level = file.level(_HEADLINE)
    return (
        baseline.platform,
        baseline.case,
        str(baseline.epoch),
        f"{len(baseline.anchor)}/{len(baseline.launches)}",
        str(num_sittings(baseline)),
        recorded_text(baseline),
        format_value(centre(_HEADLINE, file), _HEADLINE.unit),
        ", ".join(_detects(level, _HEADLINE.scale)) if level else "-",
    )


def show_lines(file: StoredFile, width: int) -> list[str]:
    """Everything that one baseline holds."""
    baseline = file.baseline
    head = [
        baseline.case,
        f"  file: {file.name}",
        f"  platform: {baseline.platform}, workload: {baseline.workload}, test: {baseline.test}",
        f"  {summary_text(baseline)}",
    ]
    forced = [
        f"  epoch {epoch}: {reason}" for epoch, reason in sorted(baseline.forced.items(), key=lambda e: int(e[0]))
    ]
    lines = [
        *[part for line in head for part in wrapped(line, width)],
        "metrics:",
        *_metric_lines(file, width),
        "launches:",
        *_launch_lines(baseline, width),
        "config:",
        *value_lines(baseline.config, width),
        "environment of the last launch:",
        *value_lines(baseline.anchor[-1].environment, width),
    ]
    return [*lines, "forced:", *(part for line in forced for part in wrapped(line, width))] if forced else lines


def summary_text(baseline: Baseline) -> str:
    """How many launches, and from when."""
    return (
        f"epoch {baseline.epoch}: {len(baseline.anchor)} anchors of {counted(len(baseline.launches), 'launch')}, "
        f"{counted(num_sittings(baseline), 'sitting')}, recorded {recorded_text(baseline)}"
    )


def num_sittings(baseline: Baseline) -> int:
    """Sittings of all its launches."""
    return len(set(sittings([stored.facts for stored in baseline.launches])))


def recorded_text(baseline: Baseline) -> str:
    """First and last day."""
    days = sorted(stored.facts.recorded_at[:10] for stored in baseline.launches)
    return f"{days[0]} to {days[-1]}" if days[0] != days[-1] else days[0]


def centre(metric: Metric, file: StoredFile) -> Value:
    """What launches are compared with; the anchor's median, or first value, where it has no level."""
    if level := file.level(metric):
        return metric.scale.from_place(level.centre, reference_step_ms(file.baseline.anchor))
    return middle(metric, file.baseline.anchor)


def uncertainty(level: Level, scale: Scale) -> float:
    """Half the 95% interval of a centre, as a change."""
    error = level.uncertainty
    return scale.change(quantile_t((1 + CONFIDENCE) / 2, error.df) * math.sqrt(error.value))


def size(change: float, scale: Scale) -> str:
    """A change without its sign."""
    return percent(change).replace("%", scale.unit)


def value_lines(values: dict[str, object], width: int) -> list[str]:
    """One value a line, as JSON."""
    lines = [f"  {key}: {json.dumps(values[key], ensure_ascii=False)}" for key in sorted(values)]
    return [part for line in lines for part in wrapped(line, width)]


def _metric_lines(file: StoredFile, width: int) -> list[str]:
    rows = [_metric_row(metric, file) for metric in METRICS.values() if centre(metric, file) is not None]
    looks = ", ".join(map(str, LOOKS))
    head = ("metric", "centre", "95%", "within", "between", f"detects with {looks}")
    lines = table([head, *rows], width, indent="  ")
    borrowed = any("*" in cell for row in rows for cell in row[3:5])
    return [*lines, *(wrapped(f"  {_BORROWED}", width) if borrowed else [])]


def _metric_row(metric: Metric, file: StoredFile) -> tuple[str, ...]:
    level, is_exact = file.level(metric), metric.direction == "exact"
    shown = format_value(centre(metric, file), metric.unit, exact=is_exact)
    if level is None:
        different = len({metric.measure(launch) for launch in file.baseline.anchor})
        note = "the same in all launches" if different == 1 else f"{different} different values"
        return metric.name, shown, "-", "-", "-", note
    own, spread = observed(epochs_of(metric, file.baseline)), level.spread
    return (
        metric.name,
        shown,
        f"+-{size(uncertainty(level, metric.scale), metric.scale)}",
        _deviation(spread.within, metric.scale, own.slower.df > 0),
        _deviation(spread.between, metric.scale, own.between.df > 0),
        ", ".join(_detects(level, metric.scale)),
    )


def _deviation(variance: Variance, scale: Scale, is_own: bool) -> str:
    return size(scale.change(math.sqrt(variance.value)), scale) + ("" if is_own else "*")


def _detects(level: Level, scale: Scale) -> list[str]:
    relative = scale is Scale.RELATIVE
    return [size(detectable(level, _ANOTHER_SITTING, look, relative=relative), scale) for look in LOOKS]


def _launch_lines(baseline: Baseline, width: int) -> list[str]:
    rows = [
        (str(number), str(stored.epoch), "yes" if stored.anchor else "-", *_launch_cells(stored.facts))
        for number, stored in enumerate(baseline.launches, 1)
    ]
    return table([_LAUNCH_COLUMNS, *rows], width, indent="  ")


def _launch_cells(facts: LaunchFacts) -> tuple[str, ...]:
    lags = facts.rank_lag_ms
    slowest = max(range(len(lags)), key=lags.__getitem__, default=0)
    return (
        facts.recorded_at,
        facts.sitting,
        facts.launcher,
        str(facts.num_steps),
        f"{facts.step_time_ms['p50']:g}",
        f"{facts.step_time_ms['p99']:g}",
        format_change(facts.step_time_growth),
        f"rank {slowest}: {lags[slowest]:.3g} ms" if lags else "-",
        ", ".join(f"{name.removesuffix('_ms')} {value:.4g} ms" for name, value in facts.canary_ms.items()) or "-",
    )
