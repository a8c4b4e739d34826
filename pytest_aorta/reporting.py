"""Text for people: the header, a failure, the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aorta.baseline import Baseline
from pytest_aorta.decision import Outcome
from pytest_aorta.devices import CPU_WORLD_SIZE, Device, World
from pytest_aorta.facts import LaunchFacts
from pytest_aorta.metrics import METRICS, format_value, middle
from pytest_aorta.options import Options
from pytest_aorta.phases import PHASES
from pytest_aorta.records import TestRecord
from pytest_aorta.result import WorkloadResult
from pytest_aorta.tables import counted
from pytest_aorta.verdicts import Verdict

_COLUMNS = ("test", "metric", "value", "baseline", "change [95%]", "tolerance", "launches", "verdict")
_DURATIONS = ("wall", *PHASES)
_DURATION_COLUMNS = ("test", "launch", "launcher", *_DURATIONS)
_MAX_DETAILS = 8


def header(options: Options, devices: Sequence[Device], torch_version: str) -> str:
    """What this run computes on and compares with."""
    usable = 0 if options.device == "cpu" else len(devices) if options.gpus is None else options.gpus
    models = sorted({device.model for device in devices[:usable]})
    where = f"{usable} x {' + '.join(models)}" if usable else "no GPU (CPU ranks)"
    world = World(usable, "cuda", tuple(devices[:usable])) if usable else World(CPU_WORLD_SIZE, "cpu")
    if options.nnodes > 1:
        where += f" on each of {options.nnodes} nodes"
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


def comparison_text(
    failing: Sequence[Verdict],
    result: WorkloadResult,
    launches: Sequence[LaunchFacts],
    baseline: Path | None,
    notes: Sequence[str] = (),
) -> str:
    """The failing verdicts, what else the launches showed, which file they were compared with, and what to do."""
    last = launches[-1]
    used = f"{len(launches)} launches of {last.num_steps} steps" if len(launches) > 1 else f"{last.num_steps} steps"
    lines = [f"{result.workload} on {result.platform}, {used}:"]
    lines += [f"  {verdict}" for verdict in failing]
    lines += [f"  {note}" for note in notes]
    lines.append(f"  ranks' own median steps: {last.fastest_rank_p50_ms:g} to {last.slowest_rank_p50_ms:g} ms")
    if baseline is not None:
        lines.append(f"  baseline: {baseline}")
    return "\n".join([*lines, *(f"  next: {step}" for step in _next_steps(failing, baseline))])


def _next_steps(failing: Sequence[Verdict], baseline: Path | None) -> list[str]:
    present = [verdict for verdict in failing if not verdict.is_lost]
    outcomes = {verdict.outcome for verdict in present}
    paired = baseline is None or any(verdict.is_by_ab for verdict in present)
    steps = []
    if baseline is not None and outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}:
        steps.append("if it is intended, record it with --update-baselines --aorta-new-epoch and say why in the commit")
    if Outcome.INCONCLUSIVE in outcomes:
        more = "pairs of launches (--aorta-max-pairs=12)" if paired else "launches (--aorta-max-launches=9)"
        steps.append(f"allow more {more}, measure more steps, or widen the tolerance")
    # Between launches of one sitting, what does not vary needs no second opinion.
    if not paired and any(verdict.delta is not None for verdict in present):
        steps.append("if in doubt, compare with another version, launch by launch: --aorta-ab=main (any git ref)")
    return steps


def noisy_baseline_text(case: str, problems: Sequence[str]) -> str:
    """Why launches were not taken for a baseline."""
    lines = [f"{case}: not recorded, since it would make a bad baseline:", *(f"  {problem}" for problem in problems)]
    return "\n".join([*lines, "  to take it all the same: --aorta-force-baseline='the reason'"])


def summary_lines(records: Sequence[TestRecord]) -> list[str]:
    """One line a metric of every test, then the totals."""
    rows = [(_short(verdict.case), *verdict.cells()) for record in records for verdict in record.verdicts]
    reasons = [verdict.reason for record in records for verdict in record.verdicts]
    lines = _table([_COLUMNS, *rows], ["", *reasons]) if rows else []
    told = [f"note: {_short(record.nodeid)}: {note}" for record in records for note in record.notes]
    return [*lines, *told, *warnings_of(records), totals(records)]


def warnings_of(records: Sequence[TestRecord]) -> list[str]:
    """What passed without having been decided."""
    # What is still open was left so, since another verdict of the test is final.
    undecided = [
        row for record in records for row in record.verdicts if row.outcome is Outcome.INCONCLUSIVE and not row.is_open
    ]
    if not undecided:
        return []
    named = ", ".join(f"{_short(row.case)} {row.metric}" for row in undecided)
    return [
        f"WARNING: nothing was decided for {named}: --aorta-strict fails such tests; more launches "
        f"(--aorta-max-launches, of A/B --aorta-max-pairs), a wider tolerance or --aorta-ab=REF can decide them"
    ]


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
    count = f"{counted(len(new.anchor), 'launch')} at its centre, {len(new.launches)} in all, epoch {new.epoch}"
    lines = [f"{'updated' if old else 'recorded'} {new.platform}: {new.case} ({count})"]
    for metric in METRICS.values():
        after, before = middle(metric, new.anchor), middle(metric, old.anchor) if old else None
        if after is None and before is None:
            continue
        shown = (format_value(value, metric.unit, exact=metric.direction == "exact") for value in (before, after))
        text = f"  {metric.name}: {' -> '.join(shown)}"
        if isinstance(before, float) and isinstance(after, float) and before:
            text += f" ({(after - before) / abs(before):+.1%})"
        lines.append(text)
    if reason := new.forced.get(str(new.epoch)):
        lines.append(f"  taken although it is noisy: {reason}")
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
