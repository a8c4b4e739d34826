"""--aorta-history: each run of pytest adds one file."""

import json
import subprocess
import sys

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.session.history import read_history
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.statistics.decision import Outcome


def kept(project):
    entries, problems = read_history(project.path / "history")
    assert problems == []
    return entries


HISTORY = ("--aorta-history=history",)


def test_each_run_adds_a_file_with_every_launch(learned):
    for step_ms in (10.0, [13.0, 13.01, 13.02]):
        learned.plant(step_ms=step_ms)
        learned.run(*HISTORY, shows="history: *history/*.jsonl")
    first, second = kept(learned)
    assert (first.outcome, second.outcome) == ("passed", "failed")
    assert [launch.facts.step_time_ms["p50"] for launch in second.comparison.launches] == [13.0, 13.01, 13.02]
    compared = first.comparison
    assert (first.revision, compared.platform, compared.workload) == (1, "toy-gpu-x2-nccl", "toy")
    verdicts = {row.metric: row for row in second.comparison.rows}
    assert verdicts["step_time_p50"].outcome is Outcome.REGRESSION
    assert verdicts["step_time_p50"].baseline == pytest.approx(10, rel=0.01)
    assert second.command.endswith(" --aorta-history=history")


def test_ini_key_is_read_and_recorded_baselines_are_kept_with_their_revision(gpu):
    gpu.ini("aorta_history = history")
    gpu.plant(step_ms=[10.0, 10.01, 9.99])
    for arguments in ([], ["--aorta-record=replace"]):
        gpu.run("--update-baselines", "--aorta-launches=3", *arguments, passed=1)
    kinds = [(entry.revision, len(entry.comparison.launches), entry.comparison.rows) for entry in kept(gpu)]
    assert kinds == [(1, 3, ()), (2, 3, ())]


def test_commit_is_kept_and_launches_of_a_reference_are_marked(versioned):
    versioned.gpus(2)
    versioned.one_test("workload.compare({'workload': 'toy', 'step_ms': 10.0}, {'workload': 'toy', 'step_ms': 10.0})")
    versioned.run(*HISTORY)
    (entry,) = kept(versioned)
    assert {launch.facts.provenance.commit for launch in entry.comparison.launches} == {
        versioned.git("rev-parse", "HEAD")
    }
    sides = [launch.side for launch in entry.comparison.launches]
    assert sides.count(Side.CANDIDATE) == sides.count(Side.REFERENCE) >= 2


def test_comparisons_of_variants_in_one_test_have_a_case_and_verdicts_each(gpu):
    gpu.test_file(
        "def test_one(workload):\n    for step_ms in (10.0, 30.0, 20.0):\n"
        "        variant = {'workload': 'toy', 'step_ms': step_ms}\n"
        "        workload.compare(variant, variant, label='B' if step_ms == 20 else 'A')\n"
    )
    gpu.run("--junitxml=junit.xml", *HISTORY, passed=1)
    compared = [entry.comparison for entry in kept(gpu)]
    times = {one.case: [row.value for row in one.rows if row.metric == "step_time_p50"] for one in compared}
    name = "test_toy.py::test_one"
    assert times == {f"{name}::A": [10.0], f"{name}::A 2": [30.0], f"{name}::B": [20.0]}
    assert gpu.read("junit.xml").count('"aorta.A.step_time_p50.baseline"') == 1


def test_runs_at_once_leave_a_file_each(project):
    project.one_test("workload.check(workload.run('toy'))")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *HISTORY]
    runs = [subprocess.Popen(command, cwd=project.path, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [run.wait(150) for run in runs] == [1, 1, 1]  # no baseline is stored
    assert len({entry.run for entry in kept(project)}) == len(list((project.path / "history").iterdir())) == 3


def test_newest_run_is_printed_for_dashboards_with_the_value_of_each_launch(learned, capsys):
    for step_ms in (10.0, [13.0, 13.01, 13.02]):
        learned.plant(step_ms=step_ms)
        learned.run(*HISTORY)
    case = kept(learned)[-1].comparison.case
    capsys.readouterr()

    def exported(form):
        assert main(["history", str(learned.path / "history"), "--format", form]) == 0
        return json.loads(capsys.readouterr().out)

    (record,) = (one for one in exported("pytorch") if one["metric"]["name"] == "step_time_p50")
    assert record["metric"]["benchmark_values"] == [13.0, 13.01, 13.02]
    known = {"unit": "ms", "platform": "toy-gpu-x2-nccl", "verdict": "regression"}
    assert record["metric"]["extra_info"].items() >= known.items()
    assert (record["model"], record["benchmark"]["extra_info"]["outcome"]) == ({"name": "toy"}, "failed")
    found = exported("bmf")[case]
    assert found["step_time_p50"] == {"value": 13.01, "lower_value": 13.0, "upper_value": 13.02}
    assert "weight_hash" not in found
