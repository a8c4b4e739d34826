"""Every reader of the package, with a strategy for its input and the errors that it may raise."""

import fcntl
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import slug
from pytest_aorta.common.model import read_model, to_builtins
from pytest_aorta.launch.guarded import _outcome
from pytest_aorta.launch.leases import holders, lease
from pytest_aorta.report.markdown import Findings, findings, markdown
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.measurements import TensorHashes
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from pytest_aorta.result.reading import collect_result
from pytest_aorta.result.trace.kineto import read_trace
from pytest_aorta.result.trace.profiled_steps import (
    CollectiveFacts,
    CollectiveTime,
    FamilyTime,
    StepOverlap,
)
from pytest_aorta.verdict.baseline import read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import (
    ENDED_WELL,
    default_priors,
    make_baseline,
    make_facts,
    make_plan,
    make_record,
    make_verdict,
    rank_values,
    stored,
    write_plan_file,
    write_rank_file,
)
from tests.unit.fuzz.mutations import damaged, damaged_bytes, damaged_json
from tests.unit.kineto_traces import rank_trace


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


# --- stored documents -------------------------------------------------------------------------------------------------

HASHES = to_builtins(TensorHashes(["w"], [[2]], {"3": ["a" * 32]}))
STEP = to_builtins(StepOverlap(10.0, 6.0, 4.0, 0.0, 2.0, 2.0, {"all_gather": CollectiveTime(4.0, 2.0)}))
CALLS = {"kind": "all_gather", "group": "0 [0, 1]", "group_size": 2, "num_bytes": 64, "ms": [4.0]}
PROFILED = {"kernels": {"gemm": {"ms": 6.0, "calls": 2.0}}, "collectives": [CALLS]}
RANK = rank_values(
    tensor_hashes={"weights": HASHES},
    boundary_hashes={"forward": HASHES},
    overlap=[STEP],
    collective_ms=[1.0, 2.0],
    memory_bytes=[5],
    grad_norm=[1.0, 1.0, 1.0],
    timeline={"compute": [[0.0, 1.0]]},
    **PROFILED,
)
FINDINGS = to_builtins(
    findings(
        [make_record("a", [make_verdict(Outcome.REGRESSION)], outcome="failed", failure="why\n/close")],
        commit="c0ffee00" * 5,
        command=("pytest",),
    )
)


def _read_findings(data: bytes, folder: Path) -> None:
    file = folder / "aorta.findings.json"
    file.write_bytes(data)
    text = markdown(read_model(file, Findings, max_bytes=1 << 20, follow_links=False), max_bytes=20_000)
    assert len(text.encode()) <= 20_000
    assert not any(line.lstrip().startswith("/") for line in text.splitlines())


def _read_ranks(data: bytes, folder: Path) -> None:
    plan = make_plan(folder)
    for rank, content in enumerate((data, json.dumps(RANK))):
        write_rank_file(folder, rank, "result.json", content)
    assert collect_result(plan, ENDED_WELL).facts


BASELINE = to_builtins(
    make_baseline(
        launches=stored(
            make_facts(
                exposed_ms={"all_gather": 1.0},
                rank_lag_ms=[1.0, 0.0],
                kernels={"gemm": FamilyTime(6.0, 2.0)},
                collectives={"all_gather": CollectiveFacts(2.0, 64.0, 3.0, [1.0, 0.0], 1)},
            )
        )
    )
)


def _read_baseline(data: bytes, folder: Path) -> None:
    file = folder / "baseline.json"
    file.write_bytes(data)
    baseline = read_baseline_file(file)
    json.dumps(to_builtins(baseline), allow_nan=False)
    for facts in baseline.center_launches:
        assert facts.device in ("cpu", "cuda")
        assert facts.provenance.moment_s > -(2**40)
    comparison = StoredComparison("case", BASELINE["config"], baseline, {}, default_priors, 3)
    for row in comparison.judge([make_facts()] * 3).rows:
        to_builtins(row)


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


def _read_trace(data: bytes, folder: Path) -> None:
    write_rank_file(folder, 0, "trace.json.gz", data)
    read_trace(folder / "ranks" / "0" / "trace.json.gz")


TRACE = json.dumps(rank_trace()).encode()
TRACES = (
    damaged(rank_trace()).map(lambda document: gzip.compress(json.dumps(document).encode(), 1))
    | damaged_bytes(gzip.compress(TRACE, 1), TRACE)
    | damaged_bytes(TRACE).map(lambda data: gzip.compress(data, 1))
)


# --- leases -----------------------------------------------------------------------------------------------------------

HOLDER = {
    "resource": "gpu0",
    "owner": "test (pid 5)",
    "since": "12:00:00",
    "exclusive": False,
}
HOLDER_FILES = damaged_json(HOLDER)


def _read_holder(data: bytes, folder: Path) -> None:
    leases = folder / "leases"
    leases.mkdir(mode=0o700, exist_ok=True)
    file = leases / f"{slug('gpu0')}.resource"
    file.write_bytes(data)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        list(map(str, holders(leases)))
    lease(["gpu0"], 1, exclusive=True, wait_s=0, folder=leases, owner="next").release()


READERS = [
    Reader("stored baseline", damaged_json(BASELINE), _read_baseline),
    Reader("findings", damaged_json(FINDINGS), _read_findings),
    Reader("rank file", damaged_json(RANK), _read_ranks),
    Reader("files of a failed launch", LEFT, _read_left, ()),
    Reader("verdict of the guard", damaged_json(VERDICT), _read_verdict),
    Reader("trace", TRACES, _read_trace),
    Reader("holders of leases", HOLDER_FILES, _read_holder),
]
