"""Draws the pictures of a failure in ``docs/_static``: the tutorial's script reads its loss in each step.

They are made of a real run, which takes a minute on CPU ranks, and need Chromium::

    python docs/picture.py

``failure.svg`` is what pytest prints, ``comment.png`` the Markdown of the run and ``annotation.png`` the annotation of
the line, both in the manner of GitHub's pages. ``schedule.svg`` has the schedules of a graph of streams, built by hand
as that of FSDP with six layers on eight ranks, whose all-gathers wait for compute in forward, and of the one before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
from pytest_aorta.report.timeline import drawn_schedules, svg  # noqa: E402
from pytest_aorta.result.trace.schedule import play  # noqa: E402
from tests.browser.chromium import find_chromium, open_browser  # noqa: E402
from tests.unit.builders import git  # noqa: E402
from tests.unit.step_graphs import fsdp_step  # noqa: E402

COLORS = {"$": "#e6edf3", "E": "#ff7b72", ">": "#e6edf3", "a": "#d29922"}
LINE_PX, CHARACTER_PX, MARGIN_PX = 20, 8.4, 20


@dataclass(frozen=True)
class Failure:
    """The tutorial's first failure: the script, what pytest printed, and the Markdown for a comment."""

    script: list[str]
    printed: list[str]
    markdown: str


def run(folder: Path, *words: str) -> str:
    """Return what a command of this environment prints in ``folder``, as in a job of GitHub."""
    job = {"COLUMNS": "110", "CI": "1", "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(folder)}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | job, capture_output=True, text=True, check=False)
    return done.stdout.replace(f"{folder}/", "")


def failure() -> Failure:
    """Return the failure that the tutorial shows first."""
    script = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script, encoding="utf-8")
        run(folder, "pytest_aorta.cli", "init", "train.py", "--", "--steps", "20")
        run(folder, "pytest", "--update-baselines")
        git(folder, "init", "--quiet", "-b", "main")
        git(folder, "add", "*.py", "baselines")
        git(folder, "commit", "--quiet", "--message", "Test the training script")
        broken = script.replace("loss.backward()", "loss.backward(); print(loss.item())")
        (folder / "train.py").write_text(broken, encoding="utf-8")
        text = run(folder, "pytest", "-p", "no:cacheprovider", "--aorta-markdown=aorta.md")
        markdown = (folder / "aorta.md").read_text(encoding="utf-8").replace(f"{folder}/", "")
    return Failure(broken.splitlines(), text.splitlines(), markdown)


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


PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 16px; width: 860px; color: #1f2328; background: #fff; }
body { font: 14px/1.5 system-ui, "Liberation Sans", sans-serif; }
pre, code, td { font: 12px/20px ui-monospace, "Liberation Mono", monospace; }
.box { border: 1px solid #d1d9e0; border-radius: 6px; }
.head { padding: 8px 16px; background: #f6f8fa; border-bottom: 1px solid #d1d9e0; color: #59636e; }
.body { padding: 4px 16px 12px; }
h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: 5px; font-size: 21px; }
pre { background: #f6f8fa; padding: 12px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-spacing: 0; width: 100%; }
td { padding: 0 10px; white-space: pre-wrap; }
td:first-child:not([colspan]) { color: #59636e; text-align: right; width: 40px; }
.added { background: #dafbe1; }
.added td:first-child { background: #aceebb; }
.error { margin: 8px 12px; padding: 8px 16px; border: 1px solid #d1d9e0; border-radius: 6px; }
.error { border-left: 4px solid #cf222e; }
</style>"""


def comment(markdown: str) -> str:
    """Return the page of a comment, with its details open."""
    text = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    # The cross is an emoji, which not every machine has a font for.
    text = text.replace("<details>", "<details open>", 1).replace("\u274c", '<b style="color: #cf222e">\u2716</b>')
    head = '<div class="head"><b>github-actions</b> (bot) commented</div>'
    return f'{PAGE}<div class="box">{head}<div class="body">{text}</div></div>'


def annotation(script: list[str], printed: list[str]) -> str:
    """Return the page of a changed file, with the first annotation of the run below its line."""
    command = next(line for line in printed if line.startswith("::error "))
    place, message = command.removeprefix("::error ").split("::", 1)
    found = dict(part.split("=", 1) for part in place.split(","))
    number = int(found["line"])
    rows = [
        f'<tr class="{"added" if at == number else ""}"><td>{at}</td><td>{escape(script[at - 1])}</td></tr>'
        for at in range(number - 3, number + 4)
    ]
    says = f"<b>{escape(unquote(found['title']))}</b><br>{escape(unquote(message))}"
    rows.insert(4, f'<tr><td colspan="2"><div class="error">{says}</div></td></tr>')
    return f'{PAGE}<div class="box"><div class="head">{found["file"]}</div><table>{"".join(rows)}</table></div>'


def photograph(pages: dict[str, str]) -> None:
    """Write pictures of pages into ``docs/_static``."""
    program = find_chromium()
    assert program is not None, "Chromium is needed"
    with tempfile.TemporaryDirectory() as name, open_browser(program, Path(name) / "profile") as browser:
        for file, text in pages.items():
            page = Path(name) / "page.html"
            page.write_text(text, encoding="utf-8")
            browser.size(892, 100)
            browser.open(page)
            browser.size(892, browser.value("document.documentElement.scrollHeight"))
            browser.screenshot(DOCS / "_static" / file)


if __name__ == "__main__":
    schedules = drawn_schedules([play(fsdp_step(gather_waits=True)), play(fsdp_step())])
    assert schedules is not None
    title = "A step of FSDP whose all-gathers wait for compute in forward, and the step before"
    (DOCS / "_static/schedule.svg").write_text(svg([(title, schedules)]), encoding="utf-8")
    found = failure()
    shown = ["$ pytest", *(line for line in found.printed if re.match(r"E  |>  |aorta: \d", line))]
    (DOCS / "_static/failure.svg").write_text(drawing(shown), encoding="utf-8")
    pages = {"comment.png": comment(found.markdown), "annotation.png": annotation(found.script, found.printed)}
    photograph(pages)
