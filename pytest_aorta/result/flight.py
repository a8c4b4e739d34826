"""Reads the dumps of torch's flight recorder to find the collective that hangs and the ranks missing from it.

NCCL ranks dump their last collectives when a collective times out. The dumps are pickles, and those of other nodes come
over the network. A pickle can run any program, so only dumps that build plain data reach torch's own analyzer, which
reads copies of them in a process of its own.
"""

from __future__ import annotations

import pickletools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.files import write_text
from pytest_aorta.common.text import brief
from pytest_aorta.result.folder import FLIGHT_FOLDER, FLIGHT_PREFIX, FLIGHT_REPORT

ANALYZER = "torch.distributed.flight_recorder.fr_trace"
# The analyzer imports torch, which takes minutes from a cold network disk or on a busy machine.
_LIMIT_S = 300.0
# A rank dumps its last 2,000 collectives: about 4 MB and a million opcodes if every collective has a deep stack.
MAX_DUMP_BYTES = 64 << 20
MAX_OPCODES = 5_000_000
# Opcodes that build None, booleans, numbers, text, lists, tuples and dictionaries. Every opcode that imports, calls or
# restores an object is absent. So are opcodes that parse decimal text, whose time grows with the square of the length.
PLAIN_OPCODES = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
        "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE",
        "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET",
        "LONG_BINGET", "MEMOIZE",
    }
)  # fmt: skip
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


def refusal(dump: bytes) -> str | None:
    """Return why a dump must not be unpickled; None for a dump that builds plain data."""
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(dump)):
            if opcode.name not in PLAIN_OPCODES:
                return f"pickle opcode {opcode.name} at byte {position:,}, allowed are opcodes that build plain data"
            # Unpickling allocates the memo up to the largest index.
            if opcode.name == "LONG_BINPUT" and isinstance(argument, int) and argument > number:
                return f"memo index {argument:,} at byte {position:,}, allowed is at most {number:,}, one per opcode"
            if number >= MAX_OPCODES:
                return f"more than the {MAX_OPCODES:,} pickle opcodes allowed"
    except Exception as error:  # noqa: BLE001 - genops names no error for damaged pickles, and raises many
        return f"not a whole pickle: {brief(str(error), 200)}"
    return None


def _copy(path: Path, folder: Path) -> str:
    """Copy a dump of plain data into ``folder``; return why it was refused, or nothing."""
    try:
        dump = read_bytes(path, max_bytes=MAX_DUMP_BYTES)
    except UnreadableFile as error:
        return f"refused {error}"
    if reason := refusal(dump):
        return f"refused {path}: {reason}"
    # Write the bytes that were checked, since a rank that still runs may change its own file.
    (folder / path.name).write_bytes(dump)
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
