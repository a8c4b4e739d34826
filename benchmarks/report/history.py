"""Builds the page of a made-up history and prints their size, the seconds to write it, and the seconds to draw them.

    python -m benchmarks.report.history [--cases 10] [--commits 200] [--launches 5] [--keep FOLDER] [--pictures FOLDER]

Needs Apache Otava; where no Chromium is installed, nothing is drawn. Drawing is timed from the navigation to the last
chart: of the charts in view, and of all charts of the page in a tall window.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pytest_aorta.cli.history import case_histories, render
from pytest_aorta.session.history import read_history
from tests.browser.chromium import Page, find_chromium, open_browser
from tests.unit.sample_history import make_history, write_history

# Charts appear at once or not at all; this limit is many times their usual duration.
_SETTLED_S = 10.0
WIDTHS = (400, 1400)
_FIGURES = "[...document.querySelectorAll('figure.plot')]"
_SECONDS = f"Math.max(...{_FIGURES}.map((figure) => Number(figure.dataset.drawn ?? 0))) / 1000"
# Charts out of view are drawn when the reader scrolls to them.
_HEIGHTS = {"in view": 1000, "of the page": 12_000}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cases", 10), ("commits", 200), ("launches", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="file for the page")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page, light and dark")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aorta-history-") as scratch:
        folder = Path(scratch)
        entries = make_history(cases=given.cases, commits=given.commits, launches=given.launches)
        write_history(folder / "history", entries)
        written = _write(folder / "history", given.keep or folder / "history.html")
        program = find_chromium()
        if program is not None:
            with open_browser(program, folder / "profile") as page:
                _draw(page, written)
                if given.pictures:
                    _photograph(page, written, given.pictures)


def _write(history: Path, file: Path) -> Path:
    """Write the page as ``aorta history page`` does, print the figures, and return the file."""
    kept = sum(file.stat().st_size for file in history.iterdir())
    began = time.perf_counter()
    entries, problems = read_history(history)
    read = time.perf_counter()
    histories = case_histories(entries)
    file.write_text(render(histories), encoding="utf-8")
    written = time.perf_counter()
    launches = sum(row.num_launches for row in histories)
    print(f"{len(histories)} cases, {len(entries)} comparisons, {launches} launches, {len(problems)} problems")
    print(f"history: {kept / 1e6:.2f} MB in {len(list(history.iterdir()))} files")
    print(f"read in {read - began:.2f} s, written in {written - read:.2f} s")
    print(f"page: {file.stat().st_size / 1e6:.2f} MB")
    return file


def _draw(page: Page, file: Path) -> None:
    for which, height in _HEIGHTS.items():
        page.size(WIDTHS[-1], height)
        page.open(file)
        time.sleep(_SETTLED_S)
        drawn = page.value(f"{_FIGURES}.filter((figure) => figure.dataset.drawn).length")
        print(f"drawn in {page.value(_SECONDS):.2f} s: {drawn} charts {which}")
    assert page.complaints == [], page.complaints


def _photograph(page: Page, file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for dark in (False, True):
            page.size(width, 1300)
            page.open(file, dark=dark)
            time.sleep(1)
            page.screenshot(folder / f"history-{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    main()
