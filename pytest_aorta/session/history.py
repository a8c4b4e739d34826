"""The history: one JSON line per comparison, written once a run."""

from __future__ import annotations

import json
import math
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_bytes
from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.schema import violation
from pytest_aorta.common.text import brief
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.record import Comparison, Side, TestRecord
from pytest_aorta.verdict.baseline import read_baseline
from pytest_aorta.verdict.metrics import Value, measured_values
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdict

SCHEMA = "history.schema.json"
SCHEMA_VERSION = 1
SUFFIX = ".jsonl"
MAX_FILE_BYTES = 64 << 20
# A launch takes 0.5 kB, so this is some 500,000 launches.
MAX_TOTAL_BYTES = 256 << 20


@dataclass(frozen=True)
class MeasuredLaunch:
    """A launch of a comparison, with its metrics and provenance.

    Attributes:
        side: The side of the comparison that was launched.
        measured_at: UTC time at which the launch had ended, ISO 8601, to the second.
        block: The session block.
        launcher: The program that started the ranks.
        commit, branch, dirty: As in :class:`~pytest_aorta.result.provenance.Provenance`.
        torch: Version of torch; None if unknown.
        accelerator: Model of the devices; None on CPU ranks.
        profiler: The profiler that slowed the steps down; empty for none.
        values: Metric -> value, in the metric's unit.
    """

    side: Side
    measured_at: str
    block: str
    launcher: str
    commit: str | None
    branch: str | None
    dirty: bool | None
    torch: str | None
    accelerator: str | None
    profiler: str
    values: dict[str, float | str]

    @classmethod
    def of(cls, facts: LaunchFacts, side: Side) -> MeasuredLaunch:
        """Build the launch from its facts."""
        return cls(
            side=side,
            measured_at=facts.recorded_at,
            block=facts.block,
            launcher=facts.launcher,
            commit=facts.commit,
            branch=facts.branch,
            dirty=facts.dirty,
            torch=_text(facts.environment.get("torch")),
            accelerator=_text(facts.environment.get("device_name")),
            profiler=facts.profiler,
            values=measured_values([facts]),
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MeasuredLaunch:
        """Build a launch from the values of :func:`dataclasses.asdict`."""
        return cls(**data | {"side": Side(data["side"])})


def _text(fact: object) -> str | None:
    return None if fact is None else str(fact)


@dataclass(frozen=True)
class HistoryVerdict:
    """The outcome for one metric; the attributes are those of :class:`~pytest_aorta.verdict.verdicts.Verdict`.

    ``reference`` is the kind of the other side, and ``change`` the verdict's ``delta``.
    """

    metric: str
    outcome: str
    reference: str
    value: Value
    baseline: Value
    change: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, verdict: Verdict) -> HistoryVerdict:
        """Build the outcome from a verdict of this run."""
        return cls(
            metric=verdict.metric,
            outcome=verdict.label,
            reference=verdict.reference.kind.value,
            value=verdict.value,
            baseline=verdict.baseline,
            change=_finite(verdict.delta),
            low=_finite(verdict.low),
            high=_finite(verdict.high),
        )


def _finite(change: float | None) -> float | None:
    """Return None for a change that JSON has no number for, such as the change from 0."""
    return change if change is not None and math.isfinite(change) else None


@dataclass(frozen=True)
class HistoryEntry:
    """One comparison of a run.

    Attributes:
        run: UTC time of the run's end and eight random hex digits.
        command: The command line of the run.
        test: The node id of the test.
        case: The test's node id and the comparison's label.
        outcome: pytest's word for the outcome of the test.
        platform: Accelerator model, number of ranks and backend.
        workload: The name of the workload.
        revision: Revision of the baseline that the launches were compared with or recorded in; None without a baseline.
        launches: The launches in order, at least one.
        verdicts: One per compared metric; empty if a baseline was recorded.
    """

    run: str
    command: str
    test: str
    case: str
    outcome: str
    platform: str
    workload: str
    revision: int | None
    launches: tuple[MeasuredLaunch, ...]
    verdicts: tuple[HistoryVerdict, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the entry's line."""
        document = {"schema_version": SCHEMA_VERSION} | asdict(self)
        # jsonschema does not accept a tuple as an array.
        return document | {key: list(document[key]) for key in ("launches", "verdicts")}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> HistoryEntry:
        """Build an entry from a validated document."""
        values = {key: value for key, value in document.items() if key != "schema_version"}
        launches = tuple(map(MeasuredLaunch.from_json, document["launches"]))
        verdicts = tuple(HistoryVerdict(**verdict) for verdict in document["verdicts"])
        return cls(**values | {"launches": launches, "verdicts": verdicts})


def read_history(folder: Path) -> tuple[list[HistoryEntry], list[str]]:
    """Return the entries of all files of a folder, and one problem per line or file that can't be read.

    Entries are in the order of their runs.

    Raises:
        AortaError: The folder does not exist, contains no history, or has more than :data:`MAX_TOTAL_BYTES`.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise AortaError(
            f"{folder}: contains no history, i.e. no file whose name ends in {SUFFIX}; the option "
            f"--aorta-history={folder} makes pytest write such a file in each run"
        )
    entries: list[HistoryEntry] = []
    problems: list[str] = []
    left = MAX_TOTAL_BYTES
    for file in files:
        try:
            content = read_bytes(file, max_bytes=MAX_FILE_BYTES)
        except UnreadableFile as error:
            problems.append(str(error))
            continue
        left -= len(content)
        if left < 0:
            raise AortaError(
                f"{folder}: larger than the {MAX_TOTAL_BYTES:,} bytes allowed; move the oldest files to another folder"
            )
        for found in _parsed(content, str(file)):
            (entries if isinstance(found, HistoryEntry) else problems).append(found)  # type: ignore[arg-type]
    return entries, problems


def _parsed(content: bytes, name: str) -> Iterator[HistoryEntry | str]:
    """Yield the entry of each line, or the problem with the line."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if line:
            try:
                yield parse_entry(line, f"{name}:{number}")
            except UnreadableFile as error:
                yield str(error)


def parse_entry(line: bytes, name: str) -> HistoryEntry:
    """Return the entry of one line; ``name`` is the file and line that an error message names.

    Raises:
        UnreadableFile: The line is not UTF-8, not strict JSON, of another version, or violates the schema.
    """
    try:
        document = parse_json(line.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{name}: not UTF-8: {error}") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise UnreadableFile(
            f"{name}: schema_version is {version!r}, but this pytest-aorta reads version {SCHEMA_VERSION}; "
            f"use the version that wrote the file"
        )
    if problem := violation(document, SCHEMA) or _impossible_moment(document):
        raise UnreadableFile(f"{name}: {problem}")
    return HistoryEntry.from_json(document)


def _impossible_moment(document: dict[str, Any]) -> str | None:
    """Return the problem with a moment that fits the schema's pattern but does not exist, such as month 13."""
    for number, launch in enumerate(document["launches"]):
        try:
            time.strptime(launch["measured_at"], UTC_FORMAT)
        except ValueError:
            return f"$.launches[{number}].measured_at: got {launch['measured_at']!r}, allowed is a moment in UTC"
    return None


# A command line may name thousands of tests.
MAX_COMMAND = 4096
# Files are read in the order of their names, so the names contain fractions of a second.
_RUN_FORMAT = "%Y%m%dT%H%M%S.%fZ"


def keep_history(records: Sequence[TestRecord], arguments: Sequence[str], options: Options) -> list[str]:
    """Write a file with one line per comparison of this run, and return lines for the summary.

    The file's name contains random digits, and the file is written atomically, so several runs can use one folder. A
    run that compared nothing writes no file.

    Args:
        records: The records of the tests.
        arguments: pytest's command line, without the program.
        options: The options of the run, with the folder.

    Raises:
        AortaError: The file can't be written, or a value does not fit the schema.
    """
    if options.history is None:
        return []
    run = f"{datetime.now(UTC).strftime(_RUN_FORMAT)}-{secrets.token_hex(4)}"
    command = brief(shlex.join(["pytest", *arguments]), MAX_COMMAND)
    entries = history_entries(records, run, command, options.baselines_dir)
    if not entries:
        return []
    file = options.history / f"{run}{SUFFIX}"
    documents = [entry.to_json() for entry in entries]
    if problem := next(filter(None, (violation(document, SCHEMA) for document in documents)), None):
        raise AortaError(f"--aorta-history: {file}: not written: a line violates its own schema: {problem}")
    try:
        options.history.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(f"{json.dumps(document, allow_nan=False)}\n" for document in documents))
    except OSError as error:
        raise AortaError(f"--aorta-history: {file}: not written: {error.strerror or error}") from None
    return [f"history: {file}"]


def history_entries(records: Sequence[TestRecord], run: str, command: str, baselines_dir: Path) -> list[HistoryEntry]:
    """Return one entry per comparison."""
    return [
        HistoryEntry(
            run=run,
            command=command,
            test=record.nodeid,
            case=comparison.case,
            outcome=record.outcome,
            platform=comparison.platform,
            workload=comparison.workload,
            revision=_revision(comparison, baselines_dir),
            launches=tuple(MeasuredLaunch.of(launch.facts, launch.side) for launch in comparison.launches),
            verdicts=tuple(map(HistoryVerdict.of, comparison.rows)),
        )
        for record in records
        for comparison in record.comparisons
    ]


def _revision(comparison: Comparison, baselines_dir: Path) -> int | None:
    """Return the revision that the verdicts name, or that the launches of ``--update-baselines`` now belong to."""
    revisions = [row.reference.revision for row in comparison.rows if row.reference.kind is ReferenceKind.BASELINE]
    if known := [revision for revision in revisions if revision is not None]:
        return known[0]
    if comparison.new is None:
        return None
    try:
        baseline = read_baseline(baselines_dir, comparison.platform, comparison.case)
    except BaselineError:  # reported when the baseline could not be written
        return None
    return None if baseline is None else baseline.revision
