"""``aorta selftest``: plants faults into the launches of tests, and shows which of them the tests find."""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.pytest_run import run_pytest, unfinished
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import create_numbered_folder, temporary_folder
from pytest_aorta.common.text import brief, counted, emit, table
from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.result.diagnosis import FailureKind
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

_UNCHANGED_RUNS = 3
_BEYOND = 1.5
_LEAST_MEMORY = 0.10
# The time limit of the launch with a hang, in durations of an unchanged launch, and at least in seconds.
_HANG_LAUNCHES, _HANG_S = 3, 15
_LAUNCHES = 5
_HEADS = ("planted", "found", "launches", "seconds")
_FOUND, _MISSED, _NOT_COVERED = "yes", "NO", "not covered"
_MAX_REASON = 400
_DECIDED = (Outcome.PASS, Outcome.IMPROVED, Outcome.INCONCLUSIVE)
_TIMES = ("late_rank_ms", "step_time_p10", "step_time_p50", "step_time_p99", "step_time_mean", "step_time_tail5")
_NUMBERS = ("weight_hash", "final_loss")
_HIDDEN = "scheduled_overlap_ratio"
_NO_BACKWARD = "torch.autograd.backward was not called in step 2"


@dataclass(frozen=True)
class _Signs:
    """Evidence that a test has found a fault.

    Attributes:
        about: What the last rank, or every rank, does.
        metrics: Metrics of which one has to be a regression; empty: the launch has to fail.
        failures: Kinds of failed launches that show the fault, too.
        without: Why it may not have been planted although the ranks have run.
    """

    about: str
    metrics: tuple[str, ...] = ()
    failures: tuple[FailureKind, ...] = ()
    without: str = "no optimizer has stepped twice"

    @property
    def remedy(self) -> str:
        """The advice for a test that does not find the fault."""
        if not self.metrics:
            return "the launch succeeded"
        return f"record more launches, or name {' or '.join(self.metrics)} in a tolerance marker"


# Replicas that differ are an error of the ranks that hash the weights.
SIGNS = {
    Plant.SLOW_RANK: _Signs("the last rank sleeps in each step, 1.5 times the tolerance", _TIMES),
    Plant.IN_LINE: _Signs(
        "compute waits for each collective",
        (_HIDDEN, "serialized_collectives", "overlap_ratio", "exposed_comm_ms"),
        without="no collective was called from Python",
    ),
    Plant.BIT: _Signs(
        "one bit of one gradient of the last rank flips in step 2", _NUMBERS, (FailureKind.RANK_EXCEPTION,)
    ),
    Plant.LOST_GRADIENT: _Signs(
        "the last rank adds nothing to the gradients of step 2", _NUMBERS, (FailureKind.RANK_EXCEPTION,), _NO_BACKWARD
    ),
    Plant.NAN: _Signs("the last rank's gradients of step 2 are NaN", (), (FailureKind.RANK_EXCEPTION,), _NO_BACKWARD),
    Plant.SUMMED: _Signs(
        "each rank's gradients are multiplied by the number of ranks",
        ("gradients", *_NUMBERS),
        without="torch.autograd.backward was not called",
    ),
    Plant.RATE: _Signs("the learning rate is multiplied by the number of ranks", ("learning_rate", *_NUMBERS)),
    Plant.SAME_SAMPLES: _Signs(
        "each rank loads the samples of rank 0", ("samples", *_NUMBERS), without="no DistributedSampler was made"
    ),
    Plant.HANG: _Signs(
        "the last rank sleeps in step 2", (), (FailureKind.HANG_IN_COLLECTIVE, FailureKind.HANG_ELSEWHERE)
    ),
    Plant.EXIT_CODE: _Signs(
        "a handler of atexit ends the last rank with code 3",
        (),
        (FailureKind.EXIT_CODE,),
        "the last rank did not reach its end",
    ),
    Plant.MEMORY: _Signs(
        "every rank holds as much as 1.5 times the tolerance, at least 10%",
        ("peak_memory_bytes",),
        without="there is no device memory",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.usage = "aorta selftest [NODE_ID ...] [-- PYTEST_OPTION ...]"
    parser.epilog = "Plants: " + "; ".join(f"{plant} ({signs.about})" for plant, signs in SIGNS.items()) + "."
    parser.add_argument("tests", nargs="*", metavar="NODE_ID", help="tests")


def run(arguments: argparse.Namespace) -> int:
    """Run the unchanged tests three times, then once with each fault, and print a table for each test.

    Raises:
        AortaError: The unchanged tests do not pass, or pytest did not run them.
    """
    with temporary_folder("aorta-selftest-") as folder:
        runs = _Runs(folder, (*arguments.tests, *arguments.args))
        unchanged = _unchanged(runs)
        found: dict[str, list[_Finding]] = {nodeid: [] for nodeid in unchanged}
        for number, plant in enumerate(SIGNS, 1):
            tried = dict(_tried(runs, plant, unchanged))
            for nodeid, finding in tried.items():
                found[nodeid].append(finding)
            # A run that is interrupted has no table.
            words = ", ".join(finding.cells[1] for finding in tried.values())
            emit([f"{number} of {len(SIGNS)}: {plant}: {words}"])
    for nodeid, findings in found.items():
        emit([f"{nodeid}:", *_table(findings)])
    every = [finding.cells[1] for findings in found.values() for finding in findings]
    emit(
        [
            f"{counted(len(every), 'fault')} planted in {counted(len(found), 'test')}: {every.count(_FOUND)} found, "
            f"{every.count(_MISSED)} not found, {every.count(_NOT_COVERED)} not covered"
        ]
    )
    return ExitCode.PROBLEM if _MISSED in every else ExitCode.OK


class _Finding(NamedTuple):
    """A row of the table, and why a test has found a fault or not, or what to change so that it is found."""

    cells: tuple[str, ...]
    reason: str


def _table(findings: Sequence[_Finding]) -> Iterator[str]:
    """Yield the lines of a table, each row with its reason below it."""
    heading, *lines = table([_HEADS, *(finding.cells for finding in findings)], indent="  ")
    yield heading
    for line, finding in zip(lines, findings, strict=True):
        yield line
        yield f"      {brief(finding.reason, _MAX_REASON)}"


@dataclass
class _Runs:
    """Runs of pytest on the same tests, each in a process of its own.

    Attributes:
        folder: The folder of these runs.
        words: Words of the command lines of all runs that follow.
    """

    folder: Path
    words: tuple[str, ...]

    def run(self, *words: str, planted: Planted | None = None, records: bool = False) -> dict[str, TestRecord]:
        """Run pytest, and return the record of each test's last attempt by node id.

        Raises:
            AortaError: pytest has ended without records.
        """
        folder = create_numbered_folder(self.folder, "run")
        environ = os.environ | (planted.environ() if planted else {})
        words = (f"--aorta-results={folder / 'results'}", *self.words, *words)
        _, found = run_pytest(words, folder, environ=environ, records=records)
        launched = {record.nodeid: record for record in found.records if record.launches}
        if not launched:
            raise unfinished(folder, "no test of this run of pytest has launched")
        return launched


def _unchanged(runs: _Runs) -> dict[str, TestRecord]:
    """Return the records of the unchanged tests, which have to pass; record a baseline where there is none."""
    records = runs.run()
    if any(row.remedy for record in records.values() for row in record.verdicts):
        emit(["no baseline is stored for this machine: recording one for this command alone"])
        runs.words += (f"--aorta-baselines={runs.folder / 'baselines'}",)
        how = (f"--aorta-launches={_LAUNCHES}", "--aorta-record=noisy:aorta selftest")
        runs.run("--update-baselines", *how, records=True)
        records = runs.run()
    for number in range(1, _UNCHANGED_RUNS + 1):
        records = runs.run() if number > 1 else records
        for record in records.values():
            if record.has_failed:
                raise AortaError(f"run {number} of unchanged code failed, so no fault can be told: {record.failure}")
    emit([f"unchanged: {counted(len(records), 'test')} passed {_UNCHANGED_RUNS} times"])
    return records


def _tried(runs: _Runs, plant: Plant, unchanged: Mapping[str, TestRecord]) -> Iterator[tuple[str, _Finding]]:
    """Yield what each test makes of a fault; no test is run if none can find it."""
    signs, mark = SIGNS[plant], runs.folder / f"planted {plant}"
    rows = {
        nodeid: [row for row in record.verdicts if row.metric in signs.metrics] for nodeid, record in unchanged.items()
    }
    gaps = {nodeid: _gap(compared, signs) for nodeid, compared in rows.items()}
    changed: Mapping[str, TestRecord] = {}
    began_s = time.monotonic()
    if not all(gaps.values()):
        size = max((_size(row, plant) for compared in rows.values() for row in compared), default=0.0)
        launch_s = max(note.wall_s for record in unchanged.values() for note in record.launches)
        limits = [f"--aorta-timeout={max(_HANG_S, round(_HANG_LAUNCHES * launch_s))}"] * (plant is Plant.HANG)
        # Other numbers show in the first launch, whatever the times of further ones.
        limits += ["--aorta-max-launches=2"] * ({*_NUMBERS} <= {*signs.metrics})
        changed = runs.run(*limits, planted=Planted(plant, size, mark))
    seconds = f"{time.monotonic() - began_s:.0f}"
    for nodeid, gap in gaps.items():
        if gap or not mark.exists():
            yield nodeid, _Finding((plant, _NOT_COVERED, "-", "-"), gap or signs.without)
        else:
            evidence, launches = _evidence(changed[nodeid], signs), str(len(changed[nodeid].launches))
            cells = (plant, _FOUND if evidence else _MISSED, launches, seconds)
            yield nodeid, _Finding(cells, evidence or _remedy(changed[nodeid], signs))


def _gap(rows: Sequence[Verdict], signs: _Signs) -> str:
    """Return why a test compares no metric that shows a fault, or nothing."""
    if any(row.metric == _HIDDEN and row.baseline == 0 for row in rows):
        return "no compute hides communication of the unchanged step"
    if not signs.metrics or any(row.outcome in _DECIDED for row in rows):
        return ""
    reasons = [row.detail or str(row.not_applicable) for row in rows]
    return reasons[0] if reasons else f"{' and '.join(signs.metrics[:2])} not measured"


def _size(row: Verdict, plant: Plant) -> float:
    """Return by how much a metric grows beyond its tolerance."""
    value = row.baseline if isinstance(row.baseline, float | int) else 0.0
    return value * max(_BEYOND * (row.tolerance.value or 0.0), _LEAST_MEMORY if plant is Plant.MEMORY else 0.0)


def _remedy(record: TestRecord, signs: _Signs) -> str:
    """Return the advice for a test that has not found the fault, and why a metric that shows it was not decided."""
    for outcome, advice in ((Outcome.INCONCLUSIVE, ""), (Outcome.NOT_APPLICABLE, f"; {signs.remedy}")):
        for row in record.verdicts:
            if row.metric in signs.metrics and row.outcome is outcome and row.detail:
                return f"{row.metric}: {row.detail}{advice}"
    return signs.remedy


def _evidence(record: TestRecord, signs: _Signs) -> str:
    """Return what shows that a test has found the fault, or nothing."""
    if not record.has_failed:
        return ""
    shown = [
        f"{row.metric}: {row.change if row.delta is not None else 'differs'}"
        for row in record.verdicts
        if row.metric in signs.metrics and row.outcome is Outcome.REGRESSION
    ]
    failures = [note.failure for note in record.launches if note.failure and note.failure.kind in signs.failures]
    return next(iter([*shown, *(failure.headline for failure in failures)]), "")
