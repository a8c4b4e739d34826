"""What a launch left in its run folder, rank by rank, as plain data; nothing in it is trusted to be there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.files import UnreadableFile, read_json
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.folder import steps_entered

_MAX_BYTES = 1 << 20
_LOG_LINES = 8
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Function and place, the path cut to its end."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-3:])}:{self.line})"


@dataclass(frozen=True)
class RankEvidence:
    """One rank's files.

    Attributes:
        started: it left its process id, or more.
        has_result: it left a result.
        error: type, message, traceback and time_ns of the exception that ended it.
        exit_code: how it ended by itself, negative for a signal; None where the agent saw nothing.
        frames: its main thread's frames, innermost first, at a time limit or a fatal signal.
        steps: measured steps it has entered.
        log_tail: the last lines of its output.
        log_bytes: the size of its output.
        in_flight: the NCCL collective it was in when it was stopped, with its sequence number.
        timed_out: the collective in which NCCL's watchdog saw it run out of time, with its sequence number.
    """

    rank: int
    started: bool
    has_result: bool
    error: dict[str, Any] | None
    exit_code: int | None
    frames: tuple[Frame, ...]
    steps: int
    log_tail: tuple[str, ...]
    log_bytes: int
    in_flight: str | None
    timed_out: str | None


def read_evidence(plan: LaunchPlan) -> list[RankEvidence]:
    """Every rank's evidence, in order of rank."""
    agent = _json(plan.run_dir / "agent.json") or {}
    exit_codes = {entry["rank"]: entry["exit_code"] for entry in agent.get("failures", ())}
    return [_read_rank(plan, rank, exit_codes.get(rank)) for rank in range(plan.world.size)]


def log_tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log, each cut to a readable length."""
    return last_lines(_text(path), _LOG_LINES)


def last_lines(text: str, limit: int) -> tuple[str, ...]:
    """The last ``limit`` lines, each cut to a readable length."""
    return tuple(line[:300] for line in text.strip().splitlines()[-limit:])


def _read_rank(plan: LaunchPlan, rank: int, exit_code: int | None) -> RankEvidence:
    folder = plan.run_dir / "ranks" / str(rank)
    return RankEvidence(
        rank=rank,
        started=(folder / "pid").exists() or (folder / "result.json").exists(),
        has_result=(folder / "result.json").exists(),
        error=_json(folder / "error.json"),
        exit_code=exit_code,
        frames=_main_frames(_text(folder / "stacks.txt")),
        steps=steps_entered(folder),
        log_tail=log_tail(folder / "output.log"),
        log_bytes=_size(folder / "output.log"),
        in_flight=_in_flight(_json(folder / "collectives.json")),
        timed_out=_timed_out(_text(folder / "output.log")),
    )


def _main_frames(stacks: str) -> tuple[Frame, ...]:
    """The main thread's frames: the last in the file that no thread's start is the outermost of."""
    found: tuple[Frame, ...] = ()
    for block in re.split(r"(?m)^(?:Current thread|Thread) ", stacks):
        matches = [_FRAME.match(line) for line in block.splitlines()[1:]]
        frames = tuple(Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match)
        if frames and frames[-1].function != "_bootstrap":
            found = frames
    return found


def _in_flight(record: dict[str, Any] | None) -> str | None:
    entries = (record or {}).get("entries") or []
    if not entries:
        return None
    first = entries[0]
    return f"{first.get('profiling_name')} number {first.get('collective_seq_id')}"


def _timed_out(log: str) -> str | None:
    match = _WATCHDOG.search(log)
    return f"{match[2]} number {match[1]}" if match else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - _MAX_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        document = read_json(path, max_bytes=_MAX_BYTES)
    except UnreadableFile:
        return None
    return document if isinstance(document, dict) else None
