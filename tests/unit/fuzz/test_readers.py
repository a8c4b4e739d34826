"""The diagnosis of a launch whose ranks left damaged and random content in its files."""

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import make_plan, nightly, write_plan_file

# Limits of one case in seconds of CPU time, and of all cases together in bytes of memory.
MAX_CASE_S = 5.0
MAX_GROWTH_BYTES = 1 << 30
ERROR = {"type": "ValueError", "message": "bad", "traceback": "Traceback ...\nValueError: bad", "time_ns": 1}
AGENT = {"failures": [{"rank": 1, "exit_code": -9}, {"rank": 0, "exit_code": 1}]}
FLIGHT = {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 7}]}
STACKS = b'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 12 in wait\n  File "c.py", line 3 in main\n'
LOG = b"step 1\n[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
NESTED = [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900]


@st.composite
def damaged(draw: st.DrawFn, *files: bytes) -> bytes:
    """Draw files that are cut short, changed in a few bytes, or random."""
    data = bytearray(draw(st.sampled_from([*files, *NESTED]) | st.binary(max_size=200)))
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(data)))
        data[position : position + draw(st.integers(0, 4))] = draw(st.binary(max_size=6))
    return bytes(data)


def encoded(document: object) -> bytes:
    return json.dumps(document).encode()


ERRORS = st.fixed_dictionaries(dict.fromkeys(("type", "message", "traceback"), st.text()) | {"time_ns": st.integers()})
LEFT = st.fixed_dictionaries(
    {},
    optional={
        "error.json": damaged(encoded(ERROR)) | ERRORS.map(encoded),
        "collectives.json": damaged(encoded(FLIGHT)),
        "../../agent.json": damaged(encoded(AGENT)),
        "stacks.txt": damaged(STACKS, STACKS.replace(b"12", b"9" * 5000)),
        "output.log": damaged(LOG, LOG.replace(b"7", b"9" * 5000)),
        "progress": st.binary(max_size=20),
        "pid": st.binary(max_size=12),
    },
)


def diagnose(files: Mapping[str, bytes], folder: Path) -> None:
    place = folder / "ranks/1"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("error.json", "collectives.json", "../../agent.json", "stacks.txt", "output.log", "progress", "pid"):
        (place / name).unlink(missing_ok=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    for reason in (EndReason.EXIT, EndReason.RANK_ERROR, EndReason.TIME_LIMIT):
        failure = launch_failure(make_plan(folder), LaunchOutcome(reason, 1, (), (), 1.0))
        assert failure is not None
        failure.text.encode("utf-8", "backslashreplace")


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("cases", [100, nightly(5000)])
def test_launch_is_diagnosed_within_limits_whatever_its_ranks_have_left(cases: int, tmp_path):
    write_plan_file(tmp_path)
    phases = [Phase.generate, Phase.shrink]

    @settings(max_examples=cases, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(LEFT)
    def check(files: Mapping[str, bytes]) -> None:
        checked.append(True)
        began_s = time.thread_time()
        diagnose(files, tmp_path)
        assert time.thread_time() - began_s < MAX_CASE_S

    checked: list[bool] = []
    before_bytes = peak_bytes()
    check()
    assert peak_bytes() - before_bytes < MAX_GROWTH_BYTES
    assert len(checked) >= cases / 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
