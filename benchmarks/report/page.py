"""Builds the report of a made-up session and prints its size and duration.

    python -m benchmarks.report.page [--tests 30] [--ranks 8] [--steps 300] [--keep FOLDER] [--pictures FOLDER]

The results are written as launches write them, and the report is built from these files as at the end of a session.
Pictures of the page with its first test open, light and dark, need Chromium.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pytest_aorta.report.data import session_report
from pytest_aorta.report.write import write_report
from tests.browser.chromium import find_chromium, open_browser
from tests.unit.sample_run import make_run, make_varied_run

# Width and height in pixels.
_PICTURE = (1320, 2000)


def main() -> None:
    """Print one line per file, and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tests", 30), ("ranks", 8), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="folder for the report")
    parser.add_argument("--pictures", type=Path, help="folder for report-light.png and report-dark.png")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aorta-report-") as scratch:
        folder = Path(scratch)
        records = make_run(folder, tests=given.tests, ranks=given.ranks, steps=given.steps)
        records += make_varied_run(folder, ranks=given.ranks, steps=given.steps)
        launches = sum(len(record.launches) for record in records)
        began, began_cpu = time.perf_counter(), time.process_time()
        report = session_report(records, title="pytest-aorta")
        read = time.perf_counter()
        written = write_report(report, (given.keep or folder) / "report.html")
        done, done_cpu = time.perf_counter(), time.process_time()
        print(f"{len(records)} tests, {launches} launches, {given.ranks} ranks x {given.steps} steps")
        print(f"read in {read - began:.2f} s, written in {done - read:.2f} s, in all {done - began:.2f} s")
        print(f"processor time {done_cpu - began_cpu:.2f} s")
        for warning in report.warnings:
            print(f"WARNING: {warning}")
        print(f"{written.name}: {written.stat().st_size / 1e6:.2f} MB")
        if given.pictures and (program := find_chromium()):
            given.pictures.mkdir(parents=True, exist_ok=True)
            with open_browser(program, folder / "profile") as page:
                page.size(*_PICTURE)
                for theme in ("light", "dark"):
                    page.open(written, dark=theme == "dark")
                    page.value("document.getElementById('test-0').open = true")
                    time.sleep(1)
                    page.screenshot(given.pictures / f"report-{theme}.png")


if __name__ == "__main__":
    main()
