"""The plugins and the script of the page on export, and reports of other plugins beside this one."""

import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.unit.builders import read_json, run_python
from tests.unit.kineto_traces import keep_traces, rank_trace

EXAMPLES = Path(__file__).parents[2] / "docs/examples/export"
BESIDE = ["pytest-json-ctrf", "pytest-json-report", "pytest-metadata", "pytest-reportlog"]


def test_traces_of_all_ranks_are_one_file_on_one_clock(tmp_path):
    keep_traces(tmp_path, [rank_trace(), rank_trace(later_ns=3_000)])
    subprocess.run([sys.executable, EXAMPLES / "open_traces.py", tmp_path, tmp_path / "all.json.gz"], check=True)
    events = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))["traceEvents"]
    first, second = (event for event in events if event["name"] == "gemm")
    assert (first["pid"], second["pid"]) == ("rank 0: 0", "rank 1: 0")
    assert second["ts"] - first["ts"] == pytest.approx(3, abs=0.01)
    assert {event["id"] for event in events if "id" in event} == {"rank 0: 5", "rank 1: 5"}
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {
        "rank 0: python3",
        "rank 1: python3",
    }


def installed(folder: Path, *arguments: str) -> Path:
    """Install the newest versions of packages into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *arguments]
    subprocess.run(command, check=True, timeout=500)
    return folder


@pytest.fixture
def failed(learned, monkeypatch):
    """A project with a baseline and a slower launch, to which packages are added by its variable PYTHONPATH."""
    learned.plant(step_ms=[13.0, 13.01, 13.02])

    def run(packages: Path, *arguments: str) -> Path:
        monkeypatch.setenv("PYTHONPATH", f"{packages}:{EXAMPLES}")
        learned.run_apart(*arguments, failed=1)
        return learned.path

    return run


@pytest.mark.extended
def test_reports_of_other_plugins_have_the_verdicts(failed, tmp_path):
    packages = installed(tmp_path, "--no-deps", *BESIDE)
    files = ["--ctrf=ctrf.json", "--json-report", "--json-report-file=report.json", "--report-log=log.jsonl"]
    folder = failed(packages, *files, "--junitxml=junit.xml")
    junit = ElementTree.parse(folder / "junit.xml").iter("property")
    expected = {one.get("name") for one in junit}
    assert {"aorta.step_time_p50.verdict", "aorta.launches"} <= expected
    (test,) = read_json(folder / "ctrf.json")["results"]["tests"]
    assert "step_time_p50" in test["trace"] + test["message"]
    (test,) = read_json(folder / "report.json")["tests"]
    assert {name for entry in test["user_properties"] for name in entry} == expected
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    (call,) = (entry for entry in log if entry.get("when") == "call")
    assert {name for name, _ in call["user_properties"]} == expected


READ = """
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
print(run.info.run_name, run.data.metrics["step_time_p50"], run.data.tags["verdict.step_time_p50"])
"""


@pytest.mark.extended
def test_comparisons_are_runs_of_mlflow(failed, tmp_path, monkeypatch):
    packages = installed(tmp_path, "mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = failed(packages, "-p", "mlflow_runs")
    read = run_python("-c", READ, cwd=folder, check=True)
    assert read.stdout.split() == ["test_toy.py::test_one::toy", "13.01", "regression"]


@pytest.mark.extended
def test_comparisons_are_runs_of_weights_and_biases(failed, tmp_path, monkeypatch):
    packages = installed(tmp_path, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = failed(packages, "-p", "wandb_runs")
    (stored,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert all(text in content for text in (b"step_time_p50", b"verdict/step_time_p50", b"test_toy.py::test_one::toy"))
