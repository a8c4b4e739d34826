"""The history: one JSON line per comparison, written once a run."""

import platform
import secrets
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import UnreadableFile, raised_as, read_bytes, slug, write_text
from pytest_aorta.common.model import Model, Positive, Text, decode, to_json
from pytest_aorta.common.text import brief
from pytest_aorta.plan.cache import cache_folder
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import Comparison, Side, TestRecord
from pytest_aorta.verdict.attribution import SPEED_CASE

SCHEMA_VERSION = 3
SUFFIX = ".jsonl"
MAX_FILE_BYTES = 64 << 20
# A launch takes about 2 kB, so this is some 100,000 launches.
MAX_TOTAL_BYTES = 256 << 20


class HistoryEntry(Model, frozen=True, kw_only=True):
    """One comparison of a run: a line of a file that ``--aorta-history`` keeps.

    Attributes:
        schema_version: Version of this schema.
        run: UTC time of the run's end and eight random hex digits; also the name of the file.
        command: Command line of the run.
        test: Node id of the test.
        outcome: pytest's word for the outcome of the test.
        revision: Revision of the baseline that the launches were compared with or recorded in; None without one.
        comparison: The comparison, without a new baseline.
    """

    schema_version: Literal[3] = 3
    run: Annotated[str, Meta(pattern="^[0-9]{8}T[0-9]{6}\\.[0-9]{6}Z-[0-9a-f]{8}$")]
    command: str
    test: Text
    outcome: str
    revision: Positive | None
    comparison: Comparison


def read_history(folder: Path) -> tuple[list[HistoryEntry], list[str]]:
    """Return the entries of all files of a folder, and one problem per line or file that can't be read.

    Entries are in the order of their runs.

    Raises:
        UsageError: The folder does not exist, or contains no history.
        AortaError: It has more than :data:`MAX_TOTAL_BYTES`.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UsageError(
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
            raise AortaError(f"{folder}: larger than the {MAX_TOTAL_BYTES:,} bytes allowed; move old files elsewhere")
        for number, line in enumerate(content.split(b"\n"), 1):
            if line:
                try:
                    entries.append(decode(line, HistoryEntry, f"{file}:{number}", by_hand=False))
                except UnreadableFile as error:
                    problems.append(str(error))
    return entries, problems


def speed_checks(folder: Path | None = None, platform: str = "") -> list[LaunchFacts]:
    """Return the launches of the speed check that a history has on a platform, or on that of the newest check.

    Without ``folder``, the history is this host's own.

    Raises:
        AortaError: As in :func:`read_history`.
    """
    folder = folder or speed_folder()
    entries = read_history(folder)[0] if any(folder.glob(f"*{SUFFIX}")) else []
    found = [entry.comparison for entry in entries if entry.comparison.case == SPEED_CASE]
    platform = platform or (found[-1].platform if found else "")
    return [facts for one in found if one.platform == platform for facts in one.facts(Side.CANDIDATE)]


def speed_folder() -> Path:
    """Return the folder of this host's speed checks in the user's cache, which hosts may share."""
    return cache_folder() / "speed" / slug(platform.node())


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
        AortaError: The file can't be written.
    """
    if options.history is None:
        return []
    run = f"{datetime.now(UTC).strftime(_RUN_FORMAT)}-{secrets.token_hex(4)}"
    command = brief(shlex.join(["pytest", *arguments]), MAX_COMMAND)
    # An infinite change, such as that from 0, is null.
    lines = [
        to_json(
            HistoryEntry(
                run=run,
                command=command,
                test=record.nodeid,
                outcome=record.outcome,
                revision=_revision(comparison),
                comparison=comparison.replace(new=None),
            )
        )
        for record in records
        for comparison in record.comparisons
    ]
    if not lines:
        return []
    file = options.history / f"{run}{SUFFIX}"
    with raised_as(AortaError, f"--aorta-history: {file}: not written: "):
        options.history.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(f"{line}\n" for line in lines))
    return [f"history: {file}"]


def _revision(comparison: Comparison) -> int | None:
    """Return the revision that the verdicts name, or that the launches of ``--update-baselines`` belong to."""
    if comparison.new is not None:
        return comparison.new.baseline.revision
    return next((row.reference.revision for row in comparison.rows if row.reference.revision is not None), None)
