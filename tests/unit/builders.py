"""Builds the frozen values that stages pass on, each with defaults that a test can override."""

import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from pytest_aorta.common.files import PACKAGE_ROOT, write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.plan.device_kind import Backend, Device, DeviceKind
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind, Options
from pytest_aorta.plan.options import make_options as default_options
from pytest_aorta.plan.world import World
from pytest_aorta.report.data import Case, Report, Test
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.folder import PLAN_FILE
from pytest_aorta.result.measurements import SCHEMA_VERSION, RankResult, WorkloadResult
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.result.trace.profiled_steps import Profile, StepOverlap
from pytest_aorta.session.record import ComparedLaunch, Comparison, LaunchNote, Side, TestRecord
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Note,
    Reason,
    State,
    Unrecorded,
    Verdict,
)

T = TypeVar("T")
H200 = "NVIDIA H200"
PASS, IMPROVED, REGRESSION, CHANGED = Outcome.PASS, Outcome.IMPROVED, Outcome.REGRESSION, Outcome.CHANGED
MISSING, NOT_APPLICABLE, INCONCLUSIVE = Outcome.MISSING, Outcome.NOT_APPLICABLE, Outcome.INCONCLUSIVE
CAUGHT = Decided(REGRESSION, is_expected=True)
UNRECORDED = Missing(MissingPart.BASELINE, Unrecorded.CASE)
ENDED_WELL = LaunchOutcome(EndReason.EXIT, 0, (), (), 1.5)


def schema(name: str) -> dict[str, Any]:
    """Return one of the package's JSON Schemas by file name."""
    return read_json(PACKAGE_ROOT / "common/schemas" / name)


def schema_violation(document: Any, name: str) -> str | None:
    """Return the most relevant violation of one of the package's JSON Schemas; None for a valid document."""
    error = best_match(Draft202012Validator(schema(name)).iter_errors(document))
    return error and f"{error.json_path}: {error.message}"


def replace(value: T, /, **changes: Any) -> T:
    """Return a copy of a frozen record, a struct or a dataclass, with other values."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def gpus(count: int, model: str = H200) -> list[Device]:
    return [Device(str(number), model, f"GPU-{number}") for number in range(count)]


def make_options(**changes: Any) -> Options:
    return replace(default_options({}, Path()), **({"workloads": ()} | changes))


def broken_rule(step: StepOverlap) -> str | None:
    """Return the rule of unions within one step that the lengths of a step break; None if all rules hold."""
    beside_ms = step.compute_ms + step.exposed_comm_ms + step.exposed_wait_ms + step.idle_ms
    kinds_ms = sum(time.total_ms for time in step.collectives.values())
    excess_ms = {
        "hidden_comm_ms is more than comm_ms": step.hidden_comm_ms - step.comm_ms,
        "hidden_comm_ms is more than compute_ms": step.hidden_comm_ms - step.compute_ms,
        "comm_ms is more than step_ms": step.comm_ms - step.step_ms,
        "compute_ms, exposed communication, exposed_wait_ms and idle_ms are more than step_ms": beside_ms
        - step.step_ms,
        "compute_ms, exposed communication, exposed_wait_ms, copy_ms and idle_ms are less than step_ms": (
            step.step_ms - beside_ms - step.copy_ms
        ),
        "comm_ms is more than all its collectives": step.comm_ms - kinds_ms,
    }
    for kind, of_kind in step.collectives.items():
        excess_ms[f"hidden_ms of {kind} is more than its total_ms"] = of_kind.hidden_ms - of_kind.total_ms
        excess_ms[f"{kind} is more than comm_ms"] = of_kind.total_ms - step.comm_ms
        excess_ms[f"hidden_ms of {kind} is more than hidden_comm_ms"] = of_kind.hidden_ms - step.hidden_comm_ms
    return next((rule for rule, excess in excess_ms.items() if excess > 1e-5), None)


def each_of(names: str, table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run a test for each row of a table, under the row's name."""
    return pytest.mark.parametrize(names, table.values(), ids=table)


def nightly(*values: Any, id: str | None = None) -> Any:
    """Return a row that runs every night only."""
    return pytest.param(*values, id=id, marks=pytest.mark.extended)


def write(path: Path, text: str = "") -> Path:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def install_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a torch importable from a folder beside the test's, for a test that only needs one to be there."""
    (site := folder.with_name(f"{folder.name}-site")).mkdir()
    (site / "torch.py").touch()
    monkeypatch.syspath_prepend(site)


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; ``options`` of ``subprocess.run`` go before the usual ones."""
    usual = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run([sys.executable, *arguments], **(usual | options))


def make_facts(**changes: Any) -> LaunchFacts:
    defaults = LaunchFacts(
        provenance=Provenance("2026-01-02T03:04:05Z", "0123456789ab"),
        launcher="torchrun",
        num_steps=20,
        step_time_ms={"mean": 10.0, "p50": 10.0, "p99": 12.0, "tail5": 12.0},
        metrics={},
        weight_hashes={"10": "0" * 16, "9": "1" * 16},
        final_loss=None,
        environment={"torch": "2.11.0", "device": "cuda", "device_name": H200},
        rank_lag_ms=[0.0, 0.0],
    )
    return changed(defaults, **changes)


def changed(facts: LaunchFacts, **changes: Any) -> LaunchFacts:
    """Return facts with other values, of their provenance and description too."""
    for part in ("provenance", "description"):
        value = getattr(facts, part)
        inner = {name: changes.pop(name) for name in value.__struct_fields__ if name in changes}
        changes |= {part: replace(value, **inner)} if inner else {}
    return replace(facts, **changes)


def growing(*ranks: float) -> dict[str, list[float]]:
    """Return facts on ranks whose memory grows by a fraction of it within the launch."""
    return {"memory_bytes": [200 << 20] * len(ranks), "memory_growth_bytes": [grows * (200 << 20) for grows in ranks]}


def with_p50(facts: LaunchFacts, p50: float) -> LaunchFacts:
    return facts.replace(step_time_ms=facts.step_time_ms | {"p50": p50})


def stamp(age_s: float) -> str:
    """Return the moment ``age_s`` seconds ago, in the format of facts."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s))


def on_cpu(**changes: Any) -> LaunchFacts:
    """Return a launch of CPU ranks a minute ago."""
    cpu = {"environment": {"torch": "2.11.0", "device": "cpu"}, "measured_at": stamp(60)}
    return make_facts(**(cpu | changes))


def launches_near(
    p50: float, count: int, *, deviation: float = 0.001, seed: int = 0, **changes: Any
) -> list[LaunchFacts]:
    """Return launches of one block whose medians vary around ``p50``."""
    rng = random.Random(seed)
    return [with_p50(make_facts(**changes), p50 * (1 + rng.gauss(0, deviation))) for _ in range(count)]


def stored(*facts: LaunchFacts, revision: int = 1, center: bool = True) -> tuple[StoredLaunch, ...]:
    return tuple(StoredLaunch(launch, revision, center) for launch in facts)


def make_verdict(outcome: Outcome | State, **changes: Any) -> Verdict:
    """Return a verdict in a state, or in one that has an outcome."""
    states = {
        MISSING: Missing(MissingPart.BASELINE),
        NOT_APPLICABLE: NotApplicable(Reason.LAUNCHER),
    }
    state = states.get(outcome, Decided(outcome)) if isinstance(outcome, Outcome) else outcome
    return replace(Verdict("case", "step_time_p50", state, 1.0, 1.0, None, Tolerance(0.05)), **changes)


def ran(count: int, *, failed: int = 0, traces: Sequence[str] = ()) -> tuple[LaunchNote, ...]:
    """Return the launches of a record; the last ``failed`` left no result, and the first has notes on traces."""
    return tuple(
        LaunchNote(1.0, number < count - failed, tuple(traces) if number == 0 else ()) for number in range(count)
    )


def compared(case: str, *launches: LaunchFacts, side: Side = Side.CANDIDATE, **changes: Any) -> Comparison:
    """Return a comparison of launches of one side."""
    return Comparison(case, launches=tuple(ComparedLaunch(side, facts) for facts in launches), **changes)


def make_record(
    nodeid: str, rows: Sequence[Verdict] = (), *, notes: Sequence[str] = (), has_raised: bool = False, **changes: Any
) -> TestRecord:
    """Return the record of a test with one launch and one comparison for each case that ``rows`` have.

    The error of the first comparison contains all of its verdicts if it has raised one.
    """
    cases = dict.fromkeys(row.case for row in rows) or dict.fromkeys(["case"] if notes else [])
    comparisons = tuple(Comparison(case, rows=tuple(row for row in rows if row.case == case)) for case in cases)
    if has_raised:
        failing = tuple(row.metric for row in comparisons[0].rows)
        comparisons = (replace(comparisons[0], failing=failing), *comparisons[1:])
    if notes:
        comparisons = (replace(comparisons[0], notes=tuple(map(Note, notes))), *comparisons[1:])
    return replace(TestRecord(nodeid, comparisons=comparisons, launches=ran(1), outcome="passed"), **changes)


def make_baseline(**changes: Any) -> Baseline:
    defaults = Baseline(
        case="tests/test_a.py::test_x::fsdp",
        test="tests/test_a.py::test_x",
        platform="nvidia-h200-x2-nccl",
        workload="fsdp",
        config={"steps": 20, "dtype": "float32"},
        launches=(StoredLaunch(make_facts()),),
    )
    return replace(defaults, **changes)


def baseline_of(*launches: LaunchFacts) -> Baseline:
    """Return the baseline of launches that were recorded at once."""
    return make_baseline(launches=stored(*launches))


def make_plan(run_dir: Path, **changes: Any) -> LaunchPlan:
    defaults = LaunchPlan(
        name="toy",
        spec=None,
        config={"steps": 3},
        script="train.py",
        args=(),
        world=World(2, "cpu"),
        timeout_s=60.0,
        run_dir=run_dir,
        cwd=run_dir,
    )
    return replace(defaults, **changes)


def write_plan(run_dir: Path, **changes: Any) -> None:
    """Write a plan whose script is in the folder of the launch."""
    plan = make_plan(run_dir, **({"script": str(run_dir / "train.py")} | changes))
    write_json(run_dir / PLAN_FILE, to_builtins(plan))


def as_rank_of(plan: LaunchPlan, monkeypatch: Any) -> Path:
    """Make this process rank 0 of a launch, as a rank's program does, and return the rank's folder."""
    folder = plan.run_dir / "ranks" / "0"
    folder.mkdir(parents=True)
    write(plan.run_dir / PLAN_FILE, json.dumps(to_builtins(plan)))
    monkeypatch.setenv("AORTA_RANK_FOLDER", str(folder))
    return folder


def make_script_plan(folder: Path, text: str, **changes: Any) -> LaunchPlan:
    """Write a script, and return the plan of its launch in the folder ``run`` beside it."""
    script = {"name": "train.py", "config": {}, "script": str(write(folder / "train.py", text))}
    return make_plan(folder / "run", **(script | changes))


def make_rank(step_times_ms: list[float], **changes: Any) -> RankResult:
    """Return the result of a rank that measured steps, and that passed."""
    steps = {"configured_iterations": len(step_times_ms), "total_iterations": len(step_times_ms)}
    defaults = {"passed": True, "failure_count": 0, "step_times_ms": step_times_ms, "elapsed_sec": 1.0}
    return RankResult(**steps | defaults | changes)


def rank_values(**changes: Any) -> dict[str, Any]:
    """Return the values that one rank writes to ``result.json``."""
    defaults = make_rank(
        [1.0, 2.0, 3.0],
        elapsed_sec=0.5,
        metrics={"tokens_per_s": 100.0},
        weight_hashes={"3": "ab" * 8},
        loss=[3.0, 2.0, 1.0],
        environment={"torch": "2.11.0", "device": "cpu"},
    )
    names = OF_PROFILE | {"overlap_problem": "problem"}
    profile = {names[name]: changes.pop(name) for name in changes.keys() & names.keys()}
    return to_builtins(defaults) | changes | ({"profile": profile} if profile else {})


def write_ranks(run_dir: Path, *ranks: dict[str, Any]) -> None:
    for number, document in enumerate(ranks):
        write_rank_file(run_dir, number, "result.json", json.dumps(document))


def write_plan_file(run_dir: Path) -> None:
    """Write a plan without values; a run folder without a plan counts as deleted."""
    write(run_dir / PLAN_FILE, "{}")


def write_rank_file(run_dir: Path, rank: int, name: str, content: str | bytes) -> Path:
    path = run_dir / "ranks" / str(rank) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_provenance(**changes: Any) -> Provenance:
    defaults = Provenance("2026-01-02T03:04:05Z", "0123456789ab", "c0ffee00" * 5, "main", dirty=False)
    return replace(defaults, **changes)


# Arguments of make_result with one entry per rank, the parts of a Profile that they set, and those of every rank.
BY_RANK = ("memory_bytes", "costs")
OF_PROFILE = {
    "overlap": "steps",
    "overlap_as_run": "as_run",
    "head_start": "head_start",
    "timeline": "timeline",
    "kernels": "kernels",
    "collectives": "collectives",
}
ON_EVERY_RANK = ("weight_hashes", "loss", "grad_norm", "tensor_hashes", "environment")


def make_result(rank_step_times_ms: list[list[float]], **changes: Any) -> WorkloadResult:
    """Return a result of toy ranks; values of ranks are given by rank, as the properties of a result have them."""
    steps = len(rank_step_times_ms[0])
    ranks = [_rank(times, number, changes) for number, times in enumerate(rank_step_times_ms)]
    of_ranks = {"rank_metrics", *BY_RANK, *OF_PROFILE, *ON_EVERY_RANK}
    values = {
        "schema_version": SCHEMA_VERSION,
        "workload": "toy",
        "config": {"steps": steps},
        "world_size": len(ranks),
        "device": DeviceKind.CPU,
        "backend": Backend.GLOO,
        "platform": f"cpu-x{len(ranks)}-gloo",
        "launcher": LauncherKind.TORCHRUN,
        "launch_times_s": {"wall": 1.0},
        "host": "host-a",
        "provenance": make_provenance(),
        "collective_ms": [[] for _ in ranks],
        "ranks": ranks,
    }
    return WorkloadResult(**values | {name: value for name, value in changes.items() if name not in of_ranks})


def _rank(times: list[float], number: int, changes: dict[str, Any]) -> RankResult:
    profile = {ours: changes[name][number] for name, ours in OF_PROFILE.items() if len(changes.get(name, ())) > number}
    given = {name: changes[name][number] for name in BY_RANK if changes.get(name)}
    given |= {name: changes[name] for name in ON_EVERY_RANK if name in changes}
    given["metrics"] = {key: values[number] for key, values in changes.get("rank_metrics", {}).items()}
    environment = {"torch": "2.11.0", "device": "cpu", "hostname": "not kept"}
    return make_rank(times, **{"environment": environment, "profile": Profile(**profile)} | given)


def make_report(*tests: Test, **changes: Any) -> Report:
    """Return a report of tests."""
    return Report("run", tests, **{"created_at": "2026-01-02T03:04:05Z"} | changes)


def make_case(
    *rows: Verdict,
    launches: Sequence[tuple[WorkloadResult, LaunchFacts]] = (),
    reference: Sequence[tuple[WorkloadResult, LaunchFacts]] = (),
    baseline: Baseline | None = None,
    name: str = "c",
) -> Case:
    """Return a comparison of a report with these verdicts, and results and facts of launches."""
    sides = dict(zip(Side, (launches, reference), strict=True))
    compared = tuple(ComparedLaunch(side, facts) for side, found in sides.items() for _, facts in found)
    results = {side: {number: result for number, (result, _) in enumerate(found, 1)} for side, found in sides.items()}
    return Case(name, Comparison(name, launches=compared, rows=rows), results, baseline)


def make_test(nodeid: str, outcome: str, *cases: Case, **values: Any) -> Test:
    """Return a test of a report; each case is one comparison of its record."""
    comparisons = tuple(case.comparison.replace(case=f"{nodeid}::{case.name}") for case in cases)
    return Test(TestRecord(nodeid, outcome=outcome, comparisons=comparisons, **values), cases)
