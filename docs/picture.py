"""Draws ``docs/_static/failure.svg``: what pytest prints when the tutorial's script reads its loss in each step.

The picture is made of a real run, which takes a minute on CPU ranks::

    python docs/picture.py

It also draws ``docs/_static/schedule.svg``: the schedules of a graph of streams, built by hand as that of FSDP with six
layers on eight ranks, whose all-gathers wait for compute in forward, and of the one before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
from pytest_aorta.report.timeline import drawn_schedules, svg  # noqa: E402
from pytest_aorta.result.trace.schedule import play  # noqa: E402
from tests.unit.step_graphs import fsdp_step  # noqa: E402

COLORS = {"$": "#e6edf3", "E": "#ff7b72", ">": "#e6edf3", "F": "#ff7b72", "a": "#d29922"}
LINE_PX, CHARACTER_PX, MARGIN_PX = 20, 8.4, 20


def run(folder: Path, *words: str) -> str:
    """Return what a command of this environment prints in ``folder``."""
    environ = os.environ | {"COLUMNS": "110", "CI": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout


def printed() -> list[str]:
    """Return the lines of the failure that the tutorial shows first."""
    script = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script, encoding="utf-8")
        run(folder, "pytest_aorta.cli", "init", "train.py", "--", "--steps", "20")
        run(folder, "pytest", "--update-baselines")
        broken = script.replace("loss.backward()", "loss.backward(); print(loss.item())")
        (folder / "train.py").write_text(broken, encoding="utf-8")
        text = run(folder, "pytest", "-p", "no:cacheprovider").replace(f"{folder}/", "")
    return ["$ pytest", *(line for line in text.splitlines() if re.match(r"E  |>  |FAILED |aorta: \d", line))]


def drawing(lines: list[str]) -> str:
    """Return the lines as SVG, in the colors of a dark terminal."""
    width = round(2 * MARGIN_PX + CHARACTER_PX * max(map(len, lines)))
    height = 2 * MARGIN_PX + LINE_PX * len(lines)
    texts = [
        f'<text x="{MARGIN_PX}" y="{MARGIN_PX + LINE_PX * number + 15}" fill="{COLORS[line[0]]}" xml:space="preserve">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    style = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">'
    field = f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
    return "\n".join([head + style, field, *texts, "</svg>", ""])


if __name__ == "__main__":
    schedules = drawn_schedules([play(fsdp_step(gather_waits=True)), play(fsdp_step())])
    assert schedules is not None
    title = "A step of FSDP whose all-gathers wait for compute in forward, and the step before"
    (DOCS / "_static/schedule.svg").write_text(svg([(title, schedules)]), encoding="utf-8")
    (DOCS / "_static/failure.svg").write_text(drawing(printed()), encoding="utf-8")
