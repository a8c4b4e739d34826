"""Every reader of the package, with a strategy for its input and the errors that it may raise."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pytest_aorta.common.errors import AortaError
from pytest_aorta.launch.guarded import _outcome
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import (
    make_plan,
    write_plan_file,
)
from tests.unit.fuzz.mutations import damaged_bytes, damaged_json


@dataclass(frozen=True)
class Reader:
    """A reader of the package.

    Attributes:
        name: the kind of input that it reads.
        cases: strategy for its input.
        read: function that reads one case, in an empty folder of the reader's own.
        errors: the errors that it may raise.
    """

    name: str
    cases: st.SearchStrategy[Any]
    read: Callable[[Any, Path], object]
    errors: tuple[type[BaseException], ...] = (AortaError,)


# --- what a launch leaves ---------------------------------------------------------------------------------------------

ERROR = {"type": "ValueError", "message": "bad", "traceback": "Traceback ...\nValueError: bad", "time_ns": 1}
AGENT = {"failures": [{"rank": 1, "exit_code": -9}, {"rank": 0, "exit_code": 1}]}
FLIGHT = {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 7}]}
STACKS = b'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 12 in wait\n  File "c.py", line 3 in main\n'
LOG = b"step 1\n[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
LEFT = st.fixed_dictionaries(
    {},
    optional={
        "error.json": damaged_json(ERROR) | st.just(json.dumps(ERROR).encode()),
        "collectives.json": damaged_json(FLIGHT),
        "../../agent.json": damaged_json(AGENT),
        "stacks.txt": damaged_bytes(STACKS, STACKS.replace(b"12", b"9" * 5000)),
        "output.log": damaged_bytes(LOG, LOG.replace(b"7", b"9" * 5000)),
        "progress": st.binary(max_size=20),
        "pid": st.binary(max_size=12),
    },
)


def _read_left(files: Mapping[str, bytes], folder: Path) -> None:
    plan = make_plan(folder)
    place = folder / "ranks/1"
    place.mkdir(parents=True, exist_ok=True)
    write_plan_file(folder)
    for name in ("error.json", "collectives.json", "../../agent.json", "stacks.txt", "output.log", "progress"):
        (place / name).unlink(missing_ok=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    for reason in (EndReason.EXIT, EndReason.RANK_ERROR, EndReason.TIME_LIMIT):
        failure = launch_failure(plan, LaunchOutcome(reason, 1, (), (), 1.0))
        assert failure is not None
        failure.text.encode("utf-8", "backslashreplace")


VERDICT = {
    "reason": "exit",
    "agent_status": 0,
    "stopped": [1],
    "survivors": [],
    "began_ns": 10**18,
    "wall_s": 1.5,
    "detail": "",
}


def _read_verdict(data: bytes, folder: Path) -> None:
    write_plan_file(folder)
    outcome = _outcome(data)
    launch_failure(make_plan(folder), outcome)


READERS = [
    Reader("files of a failed launch", LEFT, _read_left, ()),
    Reader("verdict of the guard", damaged_json(VERDICT), _read_verdict),
]
