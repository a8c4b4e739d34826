"""Counts false alarms and detections of ``aorta history`` on simulated series.

    python -m benchmarks.report.history_alarms [--series 100] [--commits 100]

A series has one value per commit, with the variance between session blocks of H200s, 0.15%. The check runs after each
commit from the tenth on, as a nightly job does. Needs Apache Otava.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.cli.history import case_histories, told_changes
from tests.unit.sample_history import entries_of

DEVIATION = 0.0015
FIRST_CHECK = 10
CHANGES = (0.003, 0.005, 0.01, 0.02)


def alarms(values: Sequence[float]) -> list[int]:
    """Return the numbers of commits after which a check had reported a new change."""
    (history,) = case_histories(entries_of(values))
    checks = range(FIRST_CHECK, len(values) + 1)
    told = {number: told_changes(replace(history, versions=history.versions[:number])) for number in checks}
    return [number for number, changes in told.items() if any(is_new for _, is_new in changes)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=100)
    parser.add_argument("--commits", type=int, default=100)
    given = parser.parse_args()
    rng = random.Random(0)
    unchanged = [[rng.gauss(10, 10 * DEVIATION) for _ in range(given.commits)] for _ in range(given.series)]
    false = sum(len(alarms(values)) for values in unchanged)
    checks = given.series * (given.commits - FIRST_CHECK + 1)
    print(f"no change: {false} alarms in {checks:,} checks")
    at = given.commits // 2
    for change in CHANGES:
        delays = []
        for values in unchanged:
            slower = [value * (1 + change * (number >= at)) for number, value in enumerate(values)]
            delays.append(next((number - at for number in alarms(slower) if number > at), None))
        found = sorted(delay for delay in delays if delay is not None)
        middle = found[len(found) // 2] if found else None
        print(f"{change:+.1%}: found in {len(found)} of {given.series} series, median after {middle} commits")


if __name__ == "__main__":
    main()
