"""Markdown tables of the files that benchmarks/overlap_runs.sh leaves in a folder.

Run: python -m benchmarks.overlap.summary OUT
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.overlap import split
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file

PLANTED = ("lost", "kernel", "host", "straggler")
_VERDICT = re.compile(r"aorta\.(?:.*\.)?(?P<metric>\w+)\.verdict")


@dataclass(frozen=True)
class TestRun:
    """A test of one pytest run, as read from its JUnit file."""

    name: str
    section: str
    seconds: float
    launches: int
    verdicts: dict[str, str]
    failure: str
    report: str

    @property
    def regressed(self) -> list[str]:
        """Return the metrics that regressed."""
        return [metric for metric, outcome in self.verdicts.items() if outcome == "regression"]


def main(folder: Path) -> None:
    """Print the table of each section that has files."""
    baselines = [read_baseline_file(path) for path in sorted(folder.glob("baselines/*/*.json"))]
    tests = [test for path in sorted(folder.glob("*.xml")) for test in read_junit(path)]
    show("Spread over recorded launches", spread(baselines))
    show("Recordings that failed", refused(test for test in tests if test.section == "record"))
    for section in PLANTED:
        show(f"Planted: {section}", planted([test for test in tests if test.section == section]))
    show("Kernel families", tables(folder / "families.log"))
    show("Unchanged code", alarms([test for test in tests if test.section == "alarms"]))
    rounds = folder / split.FILE
    show("Split of two planted causes", split.table(split.read(rounds)) if rounds.exists() else ())


def show(title: str, lines: Sequence[str] | Iterator[str]) -> None:
    """Print a table with its title, if it has rows."""
    rows = list(lines)
    if len(rows) > 2:
        print(f"\n### {title}\n", *rows, sep="\n")


def tables(log: Path) -> list[str]:
    """Return the Markdown tables that a benchmark has printed, with the empty lines between them."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [line for line in lines if line.startswith("|") or not line]


def read_junit(path: Path) -> list[TestRun]:
    """Return the tests of a JUnit file, whose name is the section and a number or a test."""
    section = path.name.split("-")[0]
    return [_test(case, section) for case in ET.parse(path).iter("testcase")]


def _test(case: ET.Element, section: str) -> TestRun:
    values = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
    found = {match["metric"]: value for name, value in values.items() if (match := _VERDICT.fullmatch(name))}
    failed = next((item for kind in ("failure", "error") for item in case.iter(kind)), ET.Element("failure"))
    report = failed.text or ""
    failure = failed.get("message") or report
    launches = int(values.get("aorta.launches", 0))
    return TestRun(case.get("name", ""), section, float(case.get("time", 0)), launches, found, failure, report)


def spread(baselines: Sequence[Baseline]) -> Iterator[str]:
    """Return the range of each recorded test's overlap and step time."""
    yield "| test | launches | step p50 | `overlap_ratio` | spread | `exposed_comm_ms` | `device_idle_ms` |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for baseline in baselines:
        launches = [stored.facts for stored in baseline.launches]
        times = sorted(launch.step_time_ms["p50"] for launch in launches)
        ratios = values(launches, "overlap_ratio")
        points = f"{100 * (ratios[-1] - ratios[0]):.1f} points" if ratios else "-"
        others = [extent(values(launches, name)) for name in ("exposed_comm_ms", "device_idle_ms")]
        cells = [baseline.test.split("::")[-1], str(len(launches)), f"{extent(times)} ms", extent(ratios), points]
        yield f"| {' | '.join([*cells, *others])} |"


def values(launches: Sequence[LaunchFacts], metric: str) -> list[float]:
    """Return the sorted values of a metric, of the launches that have it."""
    return sorted(launch.metrics[metric] for launch in launches if metric in launch.metrics)


def extent(numbers: Sequence[float]) -> str:
    """Return the least and the largest number as text."""
    return f"{numbers[0]:.4g} to {numbers[-1]:.4g}" if numbers else "-"


def refused(tests: Iterator[TestRun]) -> Iterator[str]:
    """Return the recordings that failed, with the reason."""
    yield "| test | reason |"
    yield "| --- | --- |"
    for test in tests:
        if test.failure:
            yield f"| {test.name} | {' '.join(test.failure.split())} |"


def planted(tests: Sequence[TestRun]) -> Iterator[str]:
    """Return how often a planted cause was flagged, by which metrics, within how many launches."""
    yield "| runs | flagged | by | launches | an explanation |"
    yield "| --- | --- | --- | --- | --- |"
    if not tests:
        return
    flagged = [test for test in tests if test.regressed]
    by = Counter(metric for test in flagged for metric in test.regressed)
    why = next((line.strip() for test in flagged for line in test.failure.splitlines() if "split of" in line), "-")
    launches = extent(sorted(float(test.launches) for test in tests))
    metrics = ", ".join(f"`{metric}` {count}" for metric, count in by.most_common())
    yield f"| {len(tests)} | {len(flagged)} | {metrics or '-'} | {launches} | {why} |"


def alarms(tests: Sequence[TestRun]) -> Iterator[str]:
    """Return false alarms, launches and time of each test over runs of unchanged code."""
    yield "| test | runs | alarms | other than pass | launches: mean, at most 1 | median time |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in dict.fromkeys(test.name for test in tests):
        of_it = [test for test in tests if test.name == name]
        alarmed = Counter(metric for test in of_it for metric in test.regressed)
        open_ones = Counter(
            f"{metric} {outcome}"
            for test in of_it
            for metric, outcome in test.verdicts.items()
            if outcome in ("inconclusive", "missing", "improved")
        )
        counts = [
            ", ".join(f"{key} {count}" for key, count in found.most_common()) or "-" for found in (alarmed, open_ones)
        ]
        single = sum(test.launches <= 1 for test in of_it)
        seconds = median(test.seconds for test in of_it)
        yield (
            f"| {name} | {len(of_it)} | {' | '.join(counts)} | {mean(test.launches for test in of_it):.2f}, "
            f"{single} of {len(of_it)} | {seconds:.1f} s |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
