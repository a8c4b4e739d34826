"""Tests of reading the telemetry of ranks, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_aorta.common.errors import ResultError
from pytest_aorta.result.trace.profiled_steps import CollectiveTime
from pytest_aorta.result.trace.rank_files import Iteration, read_iterations


def timed(step: int, compute: float, hidden: float, exposed: float, **others) -> dict:
    return {
        "step": step, "step_time_ms": 10.0 + step, "stream_ms": {"compute": compute, "copy": 0.0},
        "hidden_comm_ms": hidden, "exposed_comm_ms": exposed, "segments": {"compute": [[0.0, 1.0]]}, **others,
    }  # fmt: skip


def leave(run_dir: Path, rank: int, *lines: dict) -> Path:
    path = run_dir / "ranks" / str(rank) / "telemetry.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_steps_with_overlap_on_every_rank_are_means_over_ranks(tmp_path):
    untimed = {"step": 1, "step_time_ms": 9.0, "loss": 2.5, "lr": 0.1}
    leave(tmp_path, 0, timed(0, 6.0, 3.0, 1.0, loss=3.0), untimed, timed(2, 6.0, 0.0, 0.0))
    leave(tmp_path, 1, timed(0, 8.0, 1.0, 3.0, step_time_ms=12.0), untimed, timed(2, 6.0, 0.0, 0.0), timed(4, 1, 1, 1))
    first, last = read_iterations(tmp_path, 2)
    assert first == Iteration(0, 12.0, 7.0, 2.0, 2.0, 3.0)
    assert first.overlap_ratio == 0.5
    assert (last.step, last.loss, last.overlap_ratio) == (2, None, None)


def test_each_collective_is_a_mean_over_ranks_and_absent_on_a_rank_is_zero(tmp_path):
    reduced = {"compute": 6.0, "all_gather": 4.0, "all_reduce": 2.0}
    leave(tmp_path, 0, timed(0, 6.0, 3.0, 1.0, stream_ms=reduced, hidden_ms={"all_gather": 3.0, "all_reduce": 0.5}))
    gathered = {"compute": 6.0, "all_gather": 2.0}
    leave(tmp_path, 1, timed(0, 6.0, 3.0, 1.0, stream_ms=gathered, hidden_ms={"all_gather": 1.0}))
    (step,) = read_iterations(tmp_path, 2)
    assert step.collectives == {"all_gather": CollectiveTime(3.0, 2.0), "all_reduce": CollectiveTime(1.0, 0.25)}


def test_launch_in_which_a_rank_has_no_telemetry_has_no_iterations(tmp_path):
    leave(tmp_path, 0, timed(0, 6.0, 3.0, 1.0))
    assert read_iterations(tmp_path, 2) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_comm_ms": -1.0}, r"line 1: \$.hidden_comm_ms: got -1.0"),
        ({"step": 1.5}, r"line 1: \$.step: got 1.5"),
        ({"step_time_ms": "1"}, r"line 1: \$.step_time_ms: got \"1\""),
    ],
)
def test_line_of_another_shape_is_refused_with_its_number(tmp_path, changes, message):
    path = leave(tmp_path, 0, timed(0, 6.0, 3.0, 1.0) | changes)
    with pytest.raises(ResultError, match=message) as caught:
        read_iterations(tmp_path, 1)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"step": 0, "step_time_ms": 1.0}\n{"st'])
def test_damaged_file_is_refused(tmp_path, text):
    leave(tmp_path, 0).write_bytes(text)
    with pytest.raises(ResultError, match=r"telemetry\.jsonl: "):
        read_iterations(tmp_path, 1)
