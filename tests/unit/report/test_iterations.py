"""Tests of overlap step by step in a report of two sets of results."""

import json
from pathlib import Path

from pytest_aorta.common.model import to_builtins
from pytest_aorta.report.data import dataset_report
from pytest_aorta.report.summary import SCHEMA, summary
from tests.unit.builders import make_result, schema_violation


def keep(folder: Path, *hidden_ms: float, spans: bool = True, kind: str = "all_gather") -> Path:
    """Keep a launch of two ranks with 4 ms of communication per step, by one kind of collective."""
    run = folder / "test_a" / "0-toy"
    run.mkdir(parents=True)
    steps = len(hidden_ms)
    (run / "result.json").write_text(json.dumps(to_builtins(make_result([[10.0] * steps] * 2))))
    for rank in range(2):
        (run / "ranks" / str(rank)).mkdir(parents=True)
        lines = [{"step": step, "step_time_ms": 10.0, "loss": 2.0} for step in range(steps)]
        for line, hidden in zip(lines, hidden_ms if spans else (), strict=False):
            line |= {"stream_ms": {"compute": 6.0, kind: 4.0}, "hidden_ms": {kind: hidden}}
            line |= {"hidden_comm_ms": hidden, "exposed_comm_ms": 4.0 - hidden}
        path = run / "ranks" / str(rank) / "telemetry.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def report_of(new: Path, old: Path):
    return dataset_report({"new": [new], "old": [old]}, "new", "old")


def test_overlap_of_both_sides_is_summarized_and_compared(tmp_path):
    old = keep(tmp_path / "old", 3.0, 4.0, kind="all_reduce")
    report = report_of(keep(tmp_path / "new", 1.0, 2.0), old)
    document = summary(report)
    assert schema_violation(document, SCHEMA) is None
    compared = document["cases"][0]["iterations"]
    assert compared["candidate"]["collectives"] == {"all_gather": {"mean_hidden_ms": 1.5, "mean_exposed_ms": 2.5}}
    assert compared["overlap_ratio_delta"] == 0.375 - 0.875


def test_without_timed_streams_there_is_no_summary_of_steps(tmp_path):
    report = report_of(keep(tmp_path / "new", 1.0, spans=False), keep(tmp_path / "old", 3.0, spans=False))
    assert summary(report)["cases"][0]["iterations"] is None


def test_damaged_telemetry_is_a_warning_and_the_launch_stays(tmp_path):
    new = keep(tmp_path / "new", 1.0)
    path = new / "test_a/0-toy/ranks/1/telemetry.jsonl"
    path.write_text("{")
    report = report_of(new, keep(tmp_path / "old", 3.0))
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith(f"telemetry left out of the report: {path}: line 1: not valid JSON")
    assert [launch.iterations for launch in report.tests[0].cases[0].candidate] == [()]
