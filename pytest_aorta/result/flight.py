"""Reads the dumps of torch's flight recorder to find the collective that hangs and the ranks missing from it.

NCCL ranks dump their last collectives, as pickles, when a collective times out. The dumps are read as built-in values
and written again for torch's own analyzer, which runs in a process of its own.
"""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.files import write_text
from pytest_aorta.common.text import brief
from pytest_aorta.result.folder import FLIGHT_FOLDER, FLIGHT_PREFIX, FLIGHT_REPORT

ANALYZER = "torch.distributed.flight_recorder.fr_trace"
# The analyzer imports torch, which takes minutes from a cold network disk or on a busy machine.
_LIMIT_S = 300.0
# A rank dumps its last 2,000 collectives: about 4 MB if every collective has a deep stack.
MAX_DUMP_BYTES = 64 << 20
# What pickle raises for a file that is torn.
_TORN = (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, MemoryError)
_MAX_REPORT = 1 << 20
_DUMP = re.compile(rf"{FLIGHT_PREFIX}[0-9]{{1,6}}")
_SEQUENCE = re.compile(r"Not all ranks joining collective, sequence number: (\d+)")
_COLLECTIVE = re.compile(r"collective: (\S+)")
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")


@dataclass(frozen=True)
class FlightVerdict:
    """The first collective that not all ranks joined, and the ranks that are missing from it."""

    collective: str
    sequence: int
    missing_ranks: tuple[int, ...]


def flight_verdict(run_dir: Path) -> FlightVerdict | None:
    """Analyze the dumps of a launch and write the analyzer's report to the run folder; None without a finding."""
    dumps = [path for path in sorted((run_dir / FLIGHT_FOLDER).glob(f"{FLIGHT_PREFIX}*")) if _DUMP.fullmatch(path.name)]
    if not dumps:
        return None
    with tempfile.TemporaryDirectory(prefix="aorta-flight-") as folder:
        refused = [reason for path in dumps if (reason := _copy(path, Path(folder)))]
        report = _analyze(folder) if len(refused) < len(dumps) else ""
    write_text(run_dir / FLIGHT_REPORT, "\n".join([*refused, report])[:_MAX_REPORT])
    return read_report(report)


class _BuiltinsOnly(pickle.Unpickler):
    """Reads numbers, texts, lists, tuples and dictionaries, and refuses to import or call anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, allowed are built-in values")


def _copy(path: Path, folder: Path) -> str:
    """Write a dump of built-in values into ``folder``; return why it was refused, or nothing."""
    try:
        dump = _BuiltinsOnly(io.BytesIO(read_bytes(path, max_bytes=MAX_DUMP_BYTES))).load()
    except UnreadableFile as error:
        return f"refused {error}"
    except _TORN as error:
        return f"refused {path}: not a whole pickle of built-in values: {brief(str(error), 200)}"
    (folder / path.name).write_bytes(pickle.dumps(dump))
    return ""


def _analyze(folder: str) -> str:
    # -P: a module in the working folder must not take the place of torch or of the standard library.
    command = [sys.executable, "-P", "-m", ANALYZER, folder, "--prefix", FLIGHT_PREFIX, "--allow-incomplete-ranks"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, cwd=folder
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{ANALYZER} did not finish: {error}"
    return ended.stdout + ended.stderr


def read_report(report: str) -> FlightVerdict | None:
    """Return the first finding in the analyzer's text; None without a finding."""
    sequence = _SEQUENCE.search(report)
    if sequence is None:
        return None
    collective, missing = (pattern.search(report, sequence.end()) for pattern in (_COLLECTIVE, _MISSING))
    if collective is None or missing is None:
        return None
    ranks = tuple(sorted(int(rank) for rank in missing[1].split(",")))
    return FlightVerdict(collective[1], int(sequence[1]), ranks)
