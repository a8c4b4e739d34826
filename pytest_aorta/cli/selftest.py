"""``aorta selftest``: plants faults into the launches of tests, and shows which of them the tests find."""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.bisect import end_of_output, running_pytest
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import create_numbered_folder, read_json
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import brief, counted, emit, table, wrapped
from pytest_aorta.plan.plants import MEMORY, PLANTS, SLOW_RANK, Plant, Planted
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

PLUGIN = "pytest_aorta.plugin.selftesting"
RECORDS_FILE = "records.json"
_UNCHANGED_RUNS = 3
_BEYOND = 1.5
_LEAST_MEMORY = 0.10
# The time limit of the launch with a hang, in durations of an unchanged launch, and at least in seconds.
_HANG_LAUNCHES, _HANG_S = 3, 15
_LAUNCHES = 5
_MAX_RECORDS_BYTES = 1 << 28
_HEADS = ("planted", "found", "launches", "seconds")
_MAX_REASON = 400
_DECIDED = (Outcome.PASS, Outcome.IMPROVED, Outcome.INCONCLUSIVE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.usage = "aorta selftest [NODE_ID ...] [-- PYTEST_OPTION ...]"
    parser.epilog = "Plants: " + "; ".join(f"{plant.name} ({plant.about})" for plant in PLANTS) + "."
    parser.add_argument("pytest", nargs="*", metavar="NODE_ID", help="tests, and after --: options of pytest")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the unchanged tests three times, then once with each fault, and print a table for each test.

    Raises:
        AortaError: The unchanged tests do not pass, or pytest did not run them.
    """
    with tempfile.TemporaryDirectory(prefix="aorta-selftest-") as folder, terminable():
        runs = _Runs(Path(folder), tuple(arguments.pytest))
        first = _unchanged(runs)
        found: dict[str, list[_Finding]] = {nodeid: [] for nodeid in first}
        for number, plant in enumerate(PLANTS, 1):
            emit([f"{number} of {len(PLANTS)}: {plant.name}"])
            for nodeid, finding in _try(runs, plant, first).items():
                found[nodeid].append(finding)
    for nodeid, findings in found.items():
        emit([f"{nodeid}:", *_table(findings)])
    every = [finding for findings in found.values() for finding in findings]
    slipped = [finding for finding in every if not (finding.evidence or finding.not_covered)]
    not_covered = sum(finding.not_covered != "" for finding in every)
    emit([
        f"{counted(len(every), 'fault')} planted in {counted(len(found), 'test')}: "
        f"{len(every) - len(slipped) - not_covered} found, {len(slipped)} not found, {not_covered} not covered"
    ])  # fmt: skip
    return ExitCode.PROBLEM if slipped else ExitCode.OK


@dataclass(frozen=True)
class _Finding:
    """Result of a test under a fault; ``not_covered`` is why the test can't find it, or empty."""

    plant: Plant
    evidence: str = ""
    not_covered: str = ""
    launches: int = 0
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """Why the fault was found or not, or what to change so that it is."""
        metrics = " or ".join(self.plant.metrics)
        remedy = f"record more launches, or name {metrics} in a tolerance marker" if metrics else "the launch succeeded"
        return self.not_covered or self.evidence or remedy

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        if self.not_covered:
            return self.plant.name, "not covered", "-", "-"
        return self.plant.name, "yes" if self.evidence else "NO", str(self.launches), f"{self.seconds:.0f}"


def _table(findings: Sequence[_Finding]) -> Iterator[str]:
    """Yield the lines of a table, each row with its reason below it, in the terminal's width or 80 columns."""
    heading, *lines = table([_HEADS, *(finding.cells for finding in findings)], indent="  ")
    yield heading
    for line, finding in zip(lines, findings, strict=True):
        yield line
        yield from wrapped(f"      {brief(finding.reason, _MAX_REASON)}", shutil.get_terminal_size().columns)


@dataclass
class _Runs:
    """Runs of pytest on the same tests, each in a process of its own.

    Attributes:
        folder: The folder of these runs.
        words: Words of the command lines of all runs that follow.
    """

    folder: Path
    words: tuple[str, ...]

    def run(self, *words: str, planted: Planted | None = None) -> dict[str, TestRecord]:
        """Run pytest, and return the record of each test's last attempt by node id.

        Raises:
            AortaError: pytest has ended without records.
        """
        folder = create_numbered_folder(self.folder, "run")
        path = folder / RECORDS_FILE
        own = ("-p", PLUGIN, f"--aorta-selftest={path}", f"--aorta-results={folder / 'results'}")
        environ = os.environ | (planted.environ() if planted else {})
        with running_pytest([*own, *self.words, *words], folder, environ) as process:
            process.wait()
        texts = read_json(path, max_bytes=_MAX_RECORDS_BYTES) if path.exists() else []
        launched = {record.nodeid: record for record in map(TestRecord.from_text, texts) if record.launches}
        if not launched:
            raise AortaError("\n".join(["no test of this run of pytest has launched:", *end_of_output(folder)]))
        return launched


def _unchanged(runs: _Runs) -> dict[str, TestRecord]:
    """Return the records of the unchanged tests, which have to pass; record a baseline where there is none."""
    first = runs.run()
    if any(row.remedy for record in first.values() for row in record.verdicts):
        emit(["no baseline is stored for this machine: recording one for this command alone"])
        runs.words += (f"--aorta-baselines={runs.folder / 'baselines'}",)
        runs.run("--update-baselines", f"--aorta-launches={_LAUNCHES}", "--aorta-record=noisy:aorta selftest")
        first = runs.run()
    for number in range(1, _UNCHANGED_RUNS + 1):
        if number > 1:
            first = runs.run()
        for record in first.values():
            if record.has_failed:
                raise AortaError(f"run {number} of unchanged code failed, so no fault can be told: {record.failure}")
    emit([f"unchanged: {counted(len(first), 'test')} passed {_UNCHANGED_RUNS} times"])
    return first


def _try(runs: _Runs, plant: Plant, first: dict[str, TestRecord]) -> dict[str, _Finding]:
    """Return what each test makes of a fault."""
    rows = {
        nodeid: [row for row in record.verdicts if row.metric in plant.metrics and row.outcome in _DECIDED]
        for nodeid, record in first.items()
    }
    gaps = {nodeid: _gap(first[nodeid], plant) if plant.metrics and not rows[nodeid] else "" for nodeid in first}
    if all(gaps.values()):
        return {nodeid: _Finding(plant, not_covered=gap) for nodeid, gap in gaps.items()}
    size = max((_size(row, plant) for found in rows.values() for row in found), default=0.0)
    mark = runs.folder / f"planted {plant.name}"
    launch_s = max(note.times_s.get("wall", 0.0) for record in first.values() for note in record.launches)
    limit = f"--aorta-timeout={max(_HANG_S, round(_HANG_LAUNCHES * launch_s))}"
    began_s = time.monotonic()
    changed = runs.run(*([limit] if plant.name == "hang" else []), planted=Planted(plant, size, mark))
    seconds = time.monotonic() - began_s
    found = {}
    for nodeid, gap in gaps.items():
        if gap or not mark.exists():
            found[nodeid] = _Finding(plant, not_covered=gap or plant.without)
        else:
            record = changed[nodeid]
            found[nodeid] = _Finding(plant, _evidence(record, plant), "", len(record.launches), seconds)
    return found


def _gap(record: TestRecord, plant: Plant) -> str:
    """Return why a test compares no metric that shows the fault."""
    reasons = [row.detail or str(row.not_applicable) for row in record.verdicts if row.metric in plant.metrics]
    return reasons[0] if reasons else f"{' and '.join(plant.metrics[:2])} not measured"


def _size(row: Verdict, plant: Plant) -> float:
    """Return the milliseconds, or bytes, by which a metric grows beyond its tolerance."""
    value = row.baseline if isinstance(row.baseline, float | int) else 0.0
    change = _BEYOND * (row.tolerance.value or 0.0)
    if plant is MEMORY:
        return value * max(change, _LEAST_MEMORY)
    return value * change if plant is SLOW_RANK else 0.0


def _evidence(record: TestRecord, plant: Plant) -> str:
    """Return what shows that a test has found the fault, or nothing."""
    if not record.has_failed:
        return ""
    shown = [row for row in record.verdicts if row.metric in plant.metrics and row.outcome is Outcome.REGRESSION]
    if shown:
        return f"{shown[0].metric}: {shown[0].change if shown[0].delta is not None else 'differs'}"
    lines = [line.strip() for line in record.failure.splitlines()]
    return next((line for text in plant.failure for line in lines if text in line), "")
