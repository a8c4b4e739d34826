"""Timelines of a report: what each rank's streams did in a step, and each step of a launch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from pytest_aorta.common.files import write_text
from pytest_aorta.report.data import Case, Launch, Report
from pytest_aorta.result.trace.overlap import Lane, difference, union
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveTime
from pytest_aorta.result.trace.rank_files import Iteration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NS_PER_MS = 1_000_000
TABLE_FILE = "overlap.csv"
# A picture is viewed as a whole and can't be zoomed, so larger timelines are left to the HTML page.
MAX_PANELS = 4
MAX_RANKS = 8
# The times of a step in the telemetry that reports show.
_ITERATION_TIMES = ("compute_ms", "hidden_comm_ms", "exposed_comm_ms")
_COLUMNS = ("step", "step_time_ms", *_ITERATION_TIMES, "overlap_ratio", "loss")
_COLORS: dict[str, str] = {
    Lane.COMPUTE: "#0072b2",
    Lane.COPY: "#8c959f",
    Lane.EXPOSED: "#c4162a",
    Lane.WAIT: "#d0d7de",
    Collective.ALL_GATHER: "#d98e00",
    Collective.REDUCE_SCATTER: "#00875f",
    Collective.ALL_REDUCE: "#b0578f",
    Collective.ALL_TO_ALL: "#c25400",
    Collective.BROADCAST: "#2f8fce",
    Collective.SEND_RECV: "#7c5a34",
    Collective.OTHER: "#6e7781",
}
_LINE_COLORS = dict(zip(_ITERATION_TIMES, ("#0072b2", "#00875f", "#c4162a"), strict=True))
# Top and height of a lane's bar, as fractions of the rank's row.
_BARS: dict[str, tuple[float, float]] = {Lane.COMPUTE: (0.0, 0.36), Lane.EXPOSED: (0.38, 0.12), Lane.COPY: (0.86, 0.1)}
_COMMUNICATION_BAR = (0.5, 0.34)
_PANEL_INCHES, _RANK_INCHES, _WIDTH_INCHES = 0.85, 0.32, 11.0
_STEPS_PANEL_INCHES = 2.4


def draw_timelines(report: Report, folder: Path) -> list[Path]:
    """Draw ``{label}_timeline.png``, a panel per case, of each side that has a profiled launch."""
    panels = _panels(report, lambda launch: any(launch.result.timeline) and launch.result.timeline[:MAX_RANKS])
    return [
        _draw(
            found,
            folder / f"{label}_timeline.png",
            lambda ranks: _PANEL_INCHES + _RANK_INCHES * len(ranks),
            _draw_ranks,
        )
        for label, found in panels
    ]


def write_iterations(report: Report, folder: Path) -> list[Path]:
    """Write ``overlap.csv`` and ``{label}_overlap.png``; write nothing if no launch has telemetry with overlap."""
    steps = list(_steps(report))
    if not steps:
        return []
    kinds = _kinds(step for _, step in steps)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    times = [f"{kind}_{part}_ms" for kind in kinds for part in ("hidden", "exposed")]
    table.writerow(("test", "case", "label", "launch", *_COLUMNS, *times))
    for place, step in steps:
        table.writerow([*place, *(getattr(step, name) for name in _COLUMNS), *_times(step, kinds)])
    path = folder / TABLE_FILE
    write_text(path, text.getvalue())
    panels = _panels(report, lambda launch: launch.iterations)
    drawn = (
        _draw(found, folder / f"{label}_overlap.png", lambda _: _STEPS_PANEL_INCHES, _draw_times)
        for label, found in panels
    )
    return [path, *drawn]


def _steps(report: Report) -> Iterator[tuple[tuple[object, ...], Iteration]]:
    """Yield each step with the test, case, label and launch that it belongs to."""
    for test in report.tests:
        for case in test.cases:
            for label, launches in ((report.candidate, case.candidate), (report.reference, case.reference)):
                for launch in launches:
                    for step in launch.iterations:
                        yield (test.record.nodeid, case.name, label, launch.number), step


def _times(step: Iteration, kinds: Sequence[str]) -> Iterator[float | None]:
    """Yield the hidden and the exposed time of each kind, None where the step did not run the kind."""
    for kind in kinds:
        time = (step.collectives or {}).get(kind)
        yield from (None, None) if time is None else (time.hidden_ms, time.exposed_ms)


def _panels(report: Report, drawn: Callable[[Launch], Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield each side's label with the title and what is drawn of the first fitting launch of each case."""
    for label, side in ((report.candidate, "candidate"), (report.reference, "reference")):
        found = [
            (f"{test.record.nodeid} {case.name}", value)
            for test in report.tests
            for case in test.cases
            if (value := next(filter(None, map(drawn, getattr(case, side))), None))
        ]
        if found:
            yield label, found[:MAX_PANELS]


def _draw(
    panels: Sequence[tuple[str, Any]], path: Path, inches: Callable[[Any], float], draw: Callable[[Axes, Any], None]
) -> Path:
    """Draw a panel with each title, which ``draw`` fills and which is so many ``inches`` high, below one another."""
    from matplotlib.figure import Figure

    heights = [inches(value) for _, value in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    rows = figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, value) in zip(rows, panels, strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        draw(axes, value)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
    return path


def _draw_ranks(axes: Axes, ranks: Sequence[Mapping[str, list[list[float]]]]) -> None:
    """Draw two bars per rank, compute above communication with the exposed time between."""
    labels: dict[str, str] = {}
    for rank, lanes in enumerate(ranks):
        for name, intervals in drawn_lanes(dict(lanes)).items():
            top, height = _BARS.get(name, _COMMUNICATION_BAR)
            spans = [(begin, end - begin) for begin, end in intervals]
            # Only a lane's first bar is in the legend.
            label = labels.setdefault(name, name.replace("_", " ")) if spans and name not in labels else None
            axes.broken_barh(spans, (rank + top, height), facecolors=_COLORS[name], label=label)
    axes.set_yticks([rank + 0.45 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_xlabel("ms", fontsize=8)
    axes.set_ylim(len(ranks), 0)
    axes.margins(x=0)


def _draw_times(axes: Axes, steps: Sequence[Iteration]) -> None:
    for name, color in _LINE_COLORS.items():
        label = name.removesuffix("_ms").replace("_", " ").replace("comm", "communication")
        values = [getattr(step, name) for step in steps]
        axes.plot([step.step for step in steps], values, color=color, label=label, marker=".", linewidth=1)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.set_ylim(bottom=0)


def drawn_lanes(lanes: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return a rank's lanes with the lane ``exposed`` added: communication that compute does not hide.

    Gaps in lanes may be closed, so use lanes for drawing only, not for computing values.
    """
    sets = {
        name: union([(round(begin * _NS_PER_MS), round(end * _NS_PER_MS)) for begin, end in intervals])
        for name, intervals in lanes.items()
    }
    others = (Lane.COMPUTE, Lane.COPY, Lane.WAIT)
    comm = union(*(moments for name, moments in sets.items() if name not in others))
    sets[Lane.EXPOSED] = difference(comm, sets.get(Lane.COMPUTE, union()))
    return {name: cast("list[list[float]]", (moments / _NS_PER_MS).tolist()) for name, moments in sets.items()}


def compared_iterations(case: Case) -> dict[str, Any] | None:
    """Return the means of both sides and the difference of their overlap; None where no launch has telemetry."""
    here, there = (_means(launches) for launches in (case.candidate, case.reference))
    if here is None and there is None:
        return None
    ratios = [side["overlap_ratio"] for side in (here, there) if side and side["overlap_ratio"] is not None]
    delta = ratios[0] - ratios[1] if len(ratios) == 2 else None
    return {"candidate": here, "reference": there, "overlap_ratio_delta": delta}


def _means(launches: Sequence[Launch]) -> dict[str, Any] | None:
    steps = [step for launch in launches for step in launch.iterations]
    if not steps:
        return None
    means = {name: fmean(getattr(step, name) for step in steps) for name in _ITERATION_TIMES}
    losses = [step.loss for step in steps if step.loss is not None]
    comm_ms = means["hidden_comm_ms"] + means["exposed_comm_ms"]
    return {
        "count": len(steps),
        "mean_loss": fmean(losses) if losses else None,
        **{f"mean_{name}": value for name, value in means.items()},
        "overlap_ratio": means["hidden_comm_ms"] / comm_ms if comm_ms else None,
        "collectives": _mean_times(steps),
    }


def _mean_times(steps: Sequence[Iteration]) -> dict[str, dict[str, float]] | None:
    """Return the means of each collective; None if a step's are unknown."""
    known = [step.collectives for step in steps if step.collectives is not None]
    if len(known) < len(steps):
        return None
    absent = CollectiveTime(0.0, 0.0)
    times = {kind: [step.get(kind, absent) for step in known] for kind in _kinds(steps)}
    return {
        kind: {f"mean_{name}": fmean(getattr(time, name) for time in found) for name in ("hidden_ms", "exposed_ms")}
        for kind, found in times.items()
    }


def _kinds(steps: Iterable[Iteration]) -> list[str]:
    """Return the kinds of collectives that any of the steps ran, in the order in which reports list them."""
    found = {kind for step in steps for kind in step.collectives or ()}
    return [str(kind) for kind in Collective if kind in found]
