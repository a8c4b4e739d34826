"""Files that a node agent sends to node 0, with the limit of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_aorta.result import folder

# One byte more than a result may have, so that node 0 can report a result that is too large.
RESULT_BYTES = (16 << 20) + 1
LOG_BYTES = 8 << 20
FLIGHT_BYTES = 64 << 20
TELEMETRY_BYTES = 64 << 20
TRACE_BYTES = 64 << 20
MARK_BYTES = 1 << 16
# Name -> largest number of bytes to send: the end of a log, the beginning of every other file.
_RANK_FILES = {
    folder.PID_FILE: MARK_BYTES,
    folder.MARKS_FILE: MARK_BYTES,
    folder.SUSPENDED_FILE: MARK_BYTES,
    folder.PROGRESS_FILE: MARK_BYTES,
    folder.OUTPUT_LOG: LOG_BYTES,
    folder.STACKS_FILE: LOG_BYTES,
    folder.NATIVE_STACKS_FILE: LOG_BYTES,
    folder.ERROR_FILE: LOG_BYTES,
    folder.IN_FLIGHT_FILE: LOG_BYTES,
    folder.RESULT_FILE: RESULT_BYTES,
    folder.TELEMETRY_FILE: TELEMETRY_BYTES,
}
_NODE_FILES = {folder.AGENT_LOG: LOG_BYTES, folder.AGENT_FILE: LOG_BYTES}


def node_files(run_dir: Path) -> Iterator[tuple[str, Path, int, int]]:
    """Yield name, path, offset and number of bytes of each file to send."""
    for name, limit in _NODE_FILES.items():
        yield from _part(run_dir, name, limit)
    for path in sorted(run_dir.glob(f"{folder.FLIGHT_FOLDER}/{folder.FLIGHT_PREFIX}*")):
        yield from _part(run_dir, f"{folder.FLIGHT_FOLDER}/{path.name}", FLIGHT_BYTES)
    for rank in sorted({path.parent for path in run_dir.glob(f"{folder.RANKS_FOLDER}/*/*")}):
        for name, limit in _RANK_FILES.items():
            yield from _part(run_dir, f"{folder.RANKS_FOLDER}/{rank.name}/{name}", limit)
        for path in sorted(rank.glob(folder.TRACES)):
            yield from _part(run_dir, f"{folder.RANKS_FOLDER}/{rank.name}/{path.name}", TRACE_BYTES)


def _part(run_dir: Path, name: str, limit: int) -> Iterator[tuple[str, Path, int, int]]:
    path = run_dir / name
    if path.is_file():
        size = path.stat().st_size
        start = max(0, size - limit) if name.endswith(".log") else 0
        yield name, path, start, min(size, limit)
