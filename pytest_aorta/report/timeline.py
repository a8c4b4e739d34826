"""Draws ``{label}_timeline.png``, the profiled step of each case, with matplotlib and without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_aorta.report.data import Launch, Report
from pytest_aorta.report.lanes import drawn_lanes
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import Collective

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture is viewed as a whole and can't be zoomed, so larger timelines are left to the HTML page.
MAX_PANELS = 4
MAX_RANKS = 8
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
# Top and height of a lane's bar, as fractions of the rank's row.
_BARS: dict[str, tuple[float, float]] = {Lane.COMPUTE: (0.0, 0.36), Lane.EXPOSED: (0.38, 0.12), Lane.COPY: (0.86, 0.1)}
_COMMUNICATION_BAR = (0.5, 0.34)
_PANEL_INCHES, _RANK_INCHES, _LEGEND_INCHES, _WIDTH_INCHES = 0.85, 0.32, 0.3, 11.0


def draw_timelines(report: Report, folder: Path) -> list[Path]:
    """Draw one file per side that has a profiled launch, with a panel per case up to ``MAX_PANELS``."""
    written = []
    for label, side in ((report.candidate, "candidate"), (report.reference, "reference")):
        panels = [
            (f"{test.nodeid} {case.name}", launch)
            for test in report.tests
            for case in test.cases
            if (launch := _profiled(getattr(case, side)))
        ]
        if panels:
            written.append(_draw(panels[:MAX_PANELS], folder / f"{label}_timeline.png"))
    return written


def _profiled(launches: Sequence[Launch]) -> Launch | None:
    return next((launch for launch in launches if any(launch.result.timeline)), None)


def _draw(panels: Sequence[tuple[str, Launch]], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = [launch.result.timeline[:MAX_RANKS] for _, launch in panels]
    heights = [_PANEL_INCHES + _RANK_INCHES * len(lanes) for lanes in ranks]
    height = sum(heights) + _LEGEND_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    FigureCanvasAgg(figure)
    names: dict[str, None] = {}
    top = height
    # Axes are placed by hand, because a layout engine draws everything a second time.
    for (title, _), lanes, panel in zip(panels, ranks, heights, strict=True):
        inside = (0.07, (top - panel + 0.45) / height, 0.91, (panel - 0.75) / height)
        axes = figure.add_axes(inside)
        axes.set_title(title, fontsize=9, loc="left")
        names |= dict.fromkeys(_draw_panel(axes, lanes))
        top -= panel
    handles = [Patch(color=_COLORS[name], label=name.replace("_", " ")) for name in names]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
    return path


def _draw_panel(axes: Axes, ranks: Sequence[Mapping[str, list[list[float]]]]) -> list[str]:
    """Draw two bars per rank, compute above communication with the exposed time between, and return the lanes drawn."""
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for rank, lanes in enumerate(ranks):
        for name, intervals in drawn_lanes(dict(lanes)).items():
            top, height = _BARS.get(name, _COMMUNICATION_BAR)
            low, high = rank + top, rank + top + height
            found = [[(begin, low), (begin, high), (end, high), (end, low)] for begin, end in intervals]
            boxes.setdefault(name, []).extend(found)
    drawn = [name for name, found in boxes.items() if found]
    for name in drawn:
        axes.add_collection(PolyCollection(boxes[name], facecolors=_COLORS[name]))
    axes.set_yticks([rank + 0.45 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.set_ylim(len(ranks), 0)
    axes.set_xlim(0, max((box[2][0] for name in drawn for box in boxes[name]), default=1.0))
    return drawn
