"""Writes overlap step by step, from the ranks' telemetry: a table of all launches, and a drawing of each side."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pytest_aorta.common.files import write_text
from pytest_aorta.report.data import Case, Launch, Report
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveTime
from pytest_aorta.result.trace.telemetry import Iteration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE_FILE = "overlap.csv"
# A picture is viewed as a whole, so its panels are limited, as in the drawing of the profiled steps.
MAX_PANELS = 4
_LINES = {"compute_ms": "#0072b2", "hidden_comm_ms": "#00875f", "exposed_comm_ms": "#c4162a"}
_COLUMNS = ("step", "step_time_ms", *_LINES, "overlap_ratio", "loss")
_PANEL_INCHES, _WIDTH_INCHES = 2.4, 11.0


def write_iterations(report: Report, folder: Path) -> list[Path]:
    """Write ``overlap.csv`` and ``{label}_overlap.png``; write nothing if no launch has telemetry with overlap."""
    kinds = _kinds(step for _, step in _steps(report))
    rows = [
        [*place, *(getattr(step, name) for name in _COLUMNS), *_times(step, kinds)] for place, step in _steps(report)
    ]
    if not rows:
        return []
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    times = [f"{kind}_{part}_ms" for kind in kinds for part in ("hidden", "exposed")]
    table.writerow(("test", "case", "label", "launch", *_COLUMNS, *times))
    table.writerows(rows)
    path = folder / TABLE_FILE
    write_text(path, text.getvalue())
    return [path, *_drawings(report, folder)]


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
    means = {name: fmean(getattr(step, name) for step in steps) for name in _LINES}
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
        kind: {
            "mean_hidden_ms": fmean(time.hidden_ms for time in found),
            "mean_exposed_ms": fmean(time.exposed_ms for time in found),
        }
        for kind, found in times.items()
    }


def _kinds(steps: Iterable[Iteration]) -> list[str]:
    """Return the kinds of collectives that any of the steps ran, in the order in which reports list them."""
    found = {kind for step in steps for kind in step.collectives or ()}
    return [str(kind) for kind in Collective if kind in found]


def _times(step: Iteration, kinds: Sequence[str]) -> Iterator[float | None]:
    """Yield the hidden and the exposed time of each kind, None where the step did not run the kind."""
    for kind in kinds:
        time = (step.collectives or {}).get(kind)
        yield from (None, None) if time is None else (time.hidden_ms, time.exposed_ms)


def _steps(report: Report) -> Iterator[tuple[tuple[object, ...], Iteration]]:
    """Yield each step with the test, case, label and launch that it belongs to."""
    for test in report.tests:
        for case in test.cases:
            for label, launches in _sides(report, case):
                for launch in launches:
                    for step in launch.iterations:
                        yield (test.nodeid, case.name, label, launch.number), step


def _sides(report: Report, case: Case) -> Iterable[tuple[str, Sequence[Launch]]]:
    return (report.candidate, case.candidate), (report.reference, case.reference)


def _drawings(report: Report, folder: Path) -> Iterator[Path]:
    """Draw one file per side, with a panel of the first launch with telemetry per case, up to ``MAX_PANELS``."""
    panels: dict[str, list[tuple[str, Sequence[Iteration]]]] = {report.candidate: [], report.reference: []}
    for test in report.tests:
        for case in test.cases:
            for label, launches in _sides(report, case):
                if steps := next((launch.iterations for launch in launches if launch.iterations), ()):
                    panels[label].append((f"{test.nodeid} {case.name}", steps))
    for label, found in panels.items():
        if found:
            yield _draw(found[:MAX_PANELS], folder / f"{label}_overlap.png")


def _draw(panels: Sequence[tuple[str, Sequence[Iteration]]], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _PANEL_INCHES * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, steps) in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(len(panels), 1, number), title, steps)
    figure.savefig(path, dpi=100)
    return path


def _draw_panel(axes: Axes, title: str, steps: Sequence[Iteration]) -> None:
    for name, color in _LINES.items():
        values = [getattr(step, name) for step in steps]
        label = name.removesuffix("_ms").replace("_", " ").replace("comm", "communication")
        axes.plot([step.step for step in steps], values, color=color, label=label, marker=".", linewidth=1)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False)
