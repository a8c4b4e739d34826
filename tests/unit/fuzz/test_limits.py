"""Files that once caused a raw traceback, took minutes, or took gigabytes: each is refused by file and key."""

import json
import re
from pathlib import Path

import pytest

from pytest_aorta.common.errors import AortaError, SpecError
from pytest_aorta.launch.guarded import _outcome
from pytest_aorta.plan.workloads import check_environment
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from pytest_aorta.result.trace.kineto import TraceError, TraceTooLarge, check_size, parse_trace
from tests.unit.builders import make_plan, write_plan_file, write_rank_file
from tests.unit.kineto_traces import rank_trace

PACKAGE = Path(__file__).parents[3] / "pytest_aorta"


# --- environments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_variable_that_no_process_can_be_given_is_named(value):
    with pytest.raises(SpecError, match=r"here: environment: got \{'NCCL_X': '.*'\}, allowed is a mapping"):
        check_environment("here", {"NCCL_X": value})


# --- what a launch leaves ---------------------------------------------------------------------------------------------


def test_files_of_another_shape_are_named_beside_the_diagnosis(tmp_path):
    write_plan_file(tmp_path)
    write_rank_file(tmp_path, 0, "error.json", '{"type": 3}')
    write_rank_file(tmp_path, 1, "collectives.json", '{"entries": {}}')
    (tmp_path / "agent.json").write_text('{"failures": [{"rank": "one", "exit_code": 1}]}')
    failure = launch_failure(make_plan(tmp_path), LaunchOutcome(EndReason.EXIT, 1, (), (), 1.0))
    assert failure is not None
    found = [line for line in failure.text.splitlines() if line.startswith("damaged: ")]
    assert [line.partition(": $")[0] for line in found] == [
        f"damaged: {tmp_path}/{name}" for name in ("agent.json", "ranks/0/error.json", "ranks/1/collectives.json")
    ]


def test_verdict_that_is_not_one_says_what_is_wrong(tmp_path):
    outcome = _outcome(b'{"reason": "tea"}')
    assert outcome.reason is EndReason.GUARD_LOST
    assert outcome.detail.startswith('verdict of the guard: $.reason: got "tea"')


# --- traces -----------------------------------------------------------------------------------------------------------


FEWER = "trace fewer steps, or steps with fewer micro-batches"


def trace_error(data: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        parse_trace(Path("trace.json"), data)
    assert isinstance(caught.value, AortaError)
    return str(caught.value).removeprefix("trace.json: ")


def test_truncated_trace_is_refused():
    assert "not valid JSON" in trace_error(json.dumps(rank_trace()).encode()[:-20])


def test_trace_that_is_too_large_is_refused_with_its_size(tmp_path):
    with (tmp_path / "trace.json").open("wb") as file:
        file.truncate(300_000_000)
    with pytest.raises(TraceTooLarge, match=f"300,000,000 bytes, and at most 268,435,456 are read; {FEWER}"):
        check_size(tmp_path / "trace.json")


def test_trace_of_too_many_values_is_refused():
    many = b'{"traceEvents": [' + b"[]," * 8_000_001 + b"[]]}"
    assert re.fullmatch(f"16,000,005 values, .*{FEWER}", trace_error(many))


# --- messages, options ------------------------------------------------------------------------------------------


def test_nothing_in_the_package_unpickles():
    unpickles = re.compile(
        r"^\s*(?:import|from) (?:pickle|_pickle|shelve|marshal|dill|cloudpickle|joblib)\b|"
        r"(?:all_gather|gather|broadcast|scatter|send|recv)_object(?:_list)?\b|torch\.load\(|\.recv\(\)|weights_only",
        re.MULTILINE,
    )
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "workloads").rglob("*.py")]
    assert len(sources) > 50
    assert [path.name for path in sources if unpickles.search(path.read_text(encoding="utf-8"))] == []
