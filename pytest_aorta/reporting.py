"""Text for people: the header, a failure, the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_aorta.baseline import Baseline
from pytest_aorta.comparison import Verdict
from pytest_aorta.devices import CPU_WORLD_SIZE, Device, World
from pytest_aorta.facts import launch_facts
from pytest_aorta.metrics import METRICS, format_value
from pytest_aorta.options import Options
from pytest_aorta.phases import PHASES
from pytest_aorta.records import TestRecord
from pytest_aorta.result import WorkloadResult

_COLUMNS = ("test", "metric", "value", "baseline", "change", "tolerance", "verdict")
_DURATIONS = ("wall", *PHASES)
_DURATION_COLUMNS = ("test", "launch", "launcher", *_DURATIONS)
_MAX_DETAILS = 8


def header(options: Options, devices: Sequence[Device], torch_version: str) -> str:
    """What this run computes on and compares with."""
    usable = 0 if options.device == "cpu" else len(devices) if options.gpus is None else options.gpus
    models = sorted({device.model for device in devices[:usable]})
    where = f"{usable} x {' + '.join(models)}" if usable else "no GPU (CPU ranks)"
    world = World(usable, "cuda", tuple(devices[:usable])) if usable else World(CPU_WORLD_SIZE, "cpu")
    folder = _relative(options.baselines_dir, options.rootdir)
    return f"aorta: {where}, torch {torch_version}, platform {world.platform}, baselines {folder}"


def failed_checks_text(result: WorkloadResult) -> str:
    """What a workload's own checks found, the first places in full."""
    first = result.failure_details[:_MAX_DETAILS]
    lines = [f"{result.workload}: {result.failure_count} of its own checks failed on {result.platform}"]
    lines += [f"  {detail}" for detail in first]
    if result.failure_count > len(first):
        lines.append(f"  ... and {result.failure_count - len(first)} more")
    return "\n".join(lines)


def comparison_text(failing: Iterable[Verdict], result: WorkloadResult, baseline: Path | None) -> str:
    """The failing verdicts, the ranks' spread, and which file they were compared with."""
    facts = launch_facts(result)
    lines = [f"{result.workload} on {result.platform}, {facts.num_steps} steps:"]
    lines += [f"  {verdict}" for verdict in failing]
    lines.append(f"  ranks' own median steps: {facts.fastest_rank_p50_ms:g} to {facts.slowest_rank_p50_ms:g} ms")
    if baseline is not None:
        lines.append(f"  baseline: {baseline}")
    return "\n".join(lines)


def summary_lines(records: Sequence[TestRecord]) -> list[str]:
    """One line a metric of every test, then the totals."""
    rows = [(_short(verdict.case), *verdict.cells()) for record in records for verdict in record.verdicts]
    reasons = [verdict.reason for record in records for verdict in record.verdicts]
    lines = _table([_COLUMNS, *rows], ["", *reasons]) if rows else []
    return [*lines, totals(records)]


def totals(records: Sequence[TestRecord]) -> str:
    """Launches, verdicts by outcome, and tests that lacked devices."""
    outcomes = Counter(verdict.outcome.value for record in records for verdict in record.verdicts)
    lacking = sum(record.lacked_devices is not None for record in records)
    launches = sum(record.num_launches for record in records)
    parts = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
    verdicts = f"{sum(outcomes.values())} compared" + (f" ({', '.join(parts)})" if parts else "")
    return f"{launches} launched, {verdicts}, {lacking} skipped for lack of devices"


def durations_lines(records: Sequence[TestRecord]) -> list[str]:
    """One line a launch, in seconds, the longest first, then the sums."""
    launches = [(record.nodeid, launch) for record in records for launch in record.launch_times]
    if not launches:
        return []
    launches.sort(key=lambda entry: -entry[1].times_s["wall"])
    rows = [
        (_short(nodeid), str(launch.number), launch.launcher, *_seconds(launch.times_s)) for nodeid, launch in launches
    ]
    sums: Counter[str] = Counter()
    for _, launch in launches:
        sums.update(launch.times_s)
    table = [_DURATION_COLUMNS, *rows, ("total", str(len(launches)), "", *_seconds(sums))]
    return ["launches in seconds, longest first:", *_table(table, [""] * len(table))]


def _seconds(times_s: Mapping[str, float]) -> list[str]:
    return [f"{times_s[name]:.2f}" if name in times_s else "-" for name in _DURATIONS]


def change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Before and after of one written baseline, metric by metric."""
    lines = [f"{'updated' if old else 'recorded'} {new.platform}: {new.case}"]
    for metric in METRICS.values():
        after = metric.measure(new.launches[-1])
        before = metric.measure(old.launches[-1]) if old else None
        if after is None and before is None:
            continue
        shown = (format_value(value, metric.unit, exact=metric.direction == "exact") for value in (before, after))
        text = f"  {metric.name}: {' -> '.join(shown)}"
        if isinstance(before, float) and isinstance(after, float) and before:
            text += f" ({(after - before) / abs(before):+.1%})"
        lines.append(text)
    return lines


def _table(rows: list[tuple[str, ...]], reasons: list[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, reason in zip(rows, reasons, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(f"{line}: {reason}" if reason else line)
    return lines


def _short(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{Path(file).stem}::{test}"


def _relative(path: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else path
