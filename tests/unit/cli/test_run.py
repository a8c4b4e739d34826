"""`aorta run` over a fake launcher: no process is started."""

import errno
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.cli import run as run_command
from pytest_aorta.cli import target
from pytest_aorta.cli.run import summary_lines, write_trial
from pytest_aorta.common.errors import ResultError
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.result.folder import rank_folders
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.trace.profiled_steps import HeadStart, StepOverlap
from pytest_aorta.session.session import Session
from tests.unit.builders import ENDED_WELL, install_torch, make_result, rank_values, read_json, write

YAML = """
description: a toy
class: Toy
min_world_size: 2
config:
  steps: {type: integer, minimum: 1, default: 3, description: measured steps}
  rate: {type: number, default: 0.5, description: a number}
  name: {type: string, default: a, description: a word}
  fault:
    type: object
    default: {kind: none, place: {layer: 1}}
    description: what goes wrong
    additionalProperties: false
    properties: {kind: {enum: [none, bad]}, place: {type: object}}
"""


class Toy:
    """Launches of the toy: the requests they received, and the results they leave."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.plans = []
        self.ranks = {}
        self.outcome = ENDED_WELL
        self.before_launch = lambda: None

    def close(self) -> None: ...

    def launch(self, plan) -> LaunchOutcome:
        self.plans.append(plan)
        self.before_launch()
        prepare_folder(plan)
        for rank, folder in enumerate(rank_folders(plan.run_dir, plan.world.ranks)):
            document = rank_values(environment={"torch": "2.11.0", "device": "cpu"}) | self.ranks.get(rank, {})
            if document.get("passed") is not None:
                (folder / "result.json").write_text(json.dumps(document))
        return self.outcome

    def all_ranks(self, **values) -> None:
        self.ranks = dict.fromkeys(range(2), values)

    @property
    def config(self) -> dict:
        return self.plans[-1].config

    def trials(self) -> list[str]:
        return sorted(path.name for path in (self.path / "results" / "toy").glob("*.json"))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    launcher = Toy(tmp_path)

    monkeypatch.setattr(target, "Session", partial(Session, make_launcher=lambda kind: launcher))
    install_torch(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "300")
    write(tmp_path / "workloads/toy/default.yaml", YAML)
    return launcher


def run(*arguments: str) -> int:
    return cli.main(["run", "--workload", "toy", "--gpus", "0", *arguments])


def refused(capsys, *arguments: str) -> str:
    """Return the message about wrong usage, after checking that it is one paragraph on stderr and the only output."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_each_trial_is_a_launch_and_a_valid_file_with_the_command_line(toy, capsys):
    assert run("--trials", "3") == 0
    assert (len(toy.plans), toy.trials()) == (3, ["trial_0.json", "trial_1.json", "trial_2.json"])
    assert len({plan.run_dir for plan in toy.plans}) == 3
    result = read_json(toy.path / "results/toy/trial_2.json")
    assert (result["workload"], result["world_size"], result["config"]["steps"]) == ("toy", 2, 3)
    assert result["provenance"]["command"] == ["aorta", "run", "--workload", "toy", "--gpus", "0", "--trials", "3"]
    assert capsys.readouterr().out.endswith("ok\n")


def test_summary_says_how_many_profiled_steps_count():
    lead = HeadStart(40.0, 3, 1.0, succeeded=True, late_steps=2)
    step = StepOverlap(10.0, 6.0, 2.0, 0.0, 2.0, 2.0)
    lines = summary_lines(make_result([[1.0, 2.0]], overlap=[[step] * 6], head_start=[lead]))
    text = "the host was late in 2 of 8 profiled steps in spite of every head start; the other 6 count"
    assert f"overlap: {text}" in lines


def test_summary_says_what_kept_the_host_from_being_ahead():
    lead = HeadStart(40.0, 2, 1.0, succeeded=False, blocked_by="cudaStreamSynchronize in aten::item")
    result = make_result([[1.0, 2.0]], head_start=[lead], rank_metrics={"exposed_comm_ms_as_run": [3.9]})
    text = "a step waits for the device in cudaStreamSynchronize in aten::item, so the host cannot run ahead"
    assert f"overlap: {text}; as run 3.9 ms" in summary_lines(result)


def test_summary_has_step_times_hash_loss_and_metrics(toy, capsys):
    toy.all_ranks(loss=[3.0, 2.5, 2.0], weight_hashes={"2": "a" * 16, "10": "b" * 16}, metrics={"peak_x": 2.0})
    toy.ranks[1] = toy.ranks[1] | {"step_times_ms": [2.0, 4.0, 6.0]}
    assert run() == 0
    out = capsys.readouterr().out
    assert "3 steps on cpu-x2-gloo" in out
    assert "step_time_p50: 4 ms" in out
    assert "weight_hash: bbbb" in out
    assert "final_loss: 2" in out
    assert "peak_x: 2" in out


def test_trials_that_another_run_writes_meanwhile_are_kept(toy, capsys):
    others = toy.path / "results/toy/trial_0.json", toy.path / "results/toy/trial_2.json"

    def another_run() -> None:
        for path in others:
            write(path, "of another run")

    toy.before_launch = another_run
    assert run("--trials", "3") == 0
    assert [path.read_text() for path in others] == ["of another run"] * 2
    own = ["trial_1.json", "trial_3.json", "trial_4.json"]
    assert toy.trials() == sorted([*own, *(path.name for path in others)])
    assert [line[:-1] for line in capsys.readouterr().out.splitlines() if line.endswith(".json:")] == [
        f"results/toy/{name}" for name in own
    ]
    assert all(read_json(toy.path / "results/toy" / name)["workload"] == "toy" for name in own)


def test_trial_has_the_names_of_aorta_beside_the_values_of_ranks(tmp_path):
    metrics = {"gemm_throughput_tflops": [3.0, 5.0], "peak_memory_bytes": [8.0, 9.0]}
    result = make_result([[4.0, 1.0, 6.0], [1.0, 2.0, 3.0]], rank_metrics=metrics)
    document = read_json(write_trial(tmp_path, result))
    assert (document["passed"], document["executed_iterations"], document["total_iterations"]) == (True, 3, 3)
    assert document["step_times_ms"] == [4.0, 2.0, 6.0]
    assert [rank["step_times_ms"] for rank in document["ranks"]] == [[4.0, 1.0, 6.0], [1.0, 2.0, 3.0]]
    assert document["metrics"] == {
        "gemm_throughput": 4.0,
        "gemm_throughput_tflops": 4.0,
        "peak_memory_bytes": 9.0,
        "step_time_p50": 4.0,
    }


def test_number_of_a_trial_that_cannot_be_written_stays_free(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_command, "write_json", full)
    with pytest.raises(ResultError, match=r"trial_0\.json: can't be written: No space left on device"):
        write_trial(tmp_path, make_result([[1.0]]))
    assert list(tmp_path.glob("trial*")) == []


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--steps", "7"], "steps", 7),
        (["--set", "steps=7"], "steps", 7),
        (["--set", "rate=1e-3"], "rate", 0.001),
        (["--set", "name=1e-3"], "name", "1e-3"),
        (["--set", "fault.kind=bad"], "fault", {"kind": "bad", "place": {"layer": 1}}),
        (["--set", "fault.place.layer=4"], "fault", {"kind": "none", "place": {"layer": 4}}),
        (["--set", "fault.place.new.part=4"], "fault", {"kind": "none", "place": {"layer": 1, "new": {"part": 4}}}),
        (["--set", "fault={kind: bad}", "--set", "fault.place={}"], "fault", {"kind": "bad", "place": {}}),
        (["--set", "name=1"], "name", "1"),
        (["--set", "environment.HSA_ENABLE_SDMA=0"], "environment", {"HSA_ENABLE_SDMA": "0"}),
        (["--set", "environment.OMP_DYNAMIC=true"], "environment", {"OMP_DYNAMIC": "true"}),
        (["--steps", "7", "--set", "steps=8"], "steps", 8),
        (["--config", "c.yaml"], "steps", 5),
        (["--config", "c.yaml", "--steps", "6"], "steps", 6),
        (["--config", "c.yaml", "--set", "fault.place.layer=9"], "fault", {"kind": "bad", "place": {"layer": 9}}),
    ],
)
def test_config_is_defaults_then_file_then_steps_then_set(toy, arguments, key, value):
    (toy.path / "c.yaml").write_text("steps: 5\nfault: {kind: bad}\n")
    assert run(*arguments) == 0
    assert toy.config[key] == value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "step=1"], "has no config keys ['step'] (did you mean 'steps'?); there are ["),
        (["--set", "step.x=1"], "has no config keys ['step'] (did you mean 'steps'?)"),
        (["--steps", "1.5"], "steps: 1.5 is not of type 'integer'"),
        (["--set", "steps=many"], "steps: 'many' is not of type 'integer'"),
        (["--set", "fault.kind=odd"], "fault.kind: 'odd' is not one of ['none', 'bad']"),
        (["--set", "steps.a=1"], "steps.a: steps is 3, and only objects have keys"),
        (["--set", "steps"], "--set: got 'steps', allowed is KEY=VALUE"),
        (["--set", "fault..kind=1"], "--set: got 'fault..kind=1', allowed is KEY=VALUE"),
        (["--set", "fault=[1"], "--set: fault: '[1': not valid YAML"),
        (["--config", "absent.yaml"], "--config: absent.yaml: can't be read"),
        (["--config", "list.yaml"], "--config: list.yaml: got list, allowed is a mapping of config keys"),
        (["--nproc", "1"], "workload 'toy' needs at least 2 ranks, and this world has 1"),
        (["--", "--lr", "1"], "['--lr', '1']: a workload takes no arguments"),
    ],
)
def test_wrong_usage_is_one_paragraph_and_launches_nothing(toy, capsys, arguments, said):
    (toy.path / "list.yaml").write_text("[1]")
    assert said in refused(capsys, *arguments)
    assert (toy.plans, toy.trials()) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trials", "0"], "--trials: got '0', allowed is an integer from 1 to 100"),
        (["--profiler", "perf"], "invalid choice: 'perf'"),
        (["--launcher", "mpi"], "--launcher/--aorta-launcher: invalid choice: 'mpi' (choose from "),
        (["--aorta-share-host"], "unrecognized arguments: --aorta-share-host"),
    ],
)
def test_value_that_an_option_does_not_take_is_a_usage_error_of_argparse(toy, capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert (toy.plans, toy.trials()) == ([], [])


def test_profiler_is_passed_to_the_launch(toy, capsys):
    assert run("--profiler", "torch") == 1
    assert toy.plans[-1].profiler == "torch"
    assert f"profiler torch left no trace in {toy.path}/results/toy/launches/" in capsys.readouterr().err


def test_without_torch_nothing_is_launched(toy, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run() == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), toy.plans) == ("", 1, [])
    assert err.startswith("aorta: torch is not installed for ")


def test_failed_launch_keeps_the_trials_before_it(toy, capsys):
    def second_fails():
        if len(toy.plans) == 2:
            toy.ranks = {1: {"passed": None}}
            toy.outcome = LaunchOutcome("exit", 0, (), (), 1.0)

    toy.before_launch = second_fails
    assert run("--trials", "3") == 1
    assert (toy.trials(), len(toy.plans)) == (["trial_0.json"], 2)
    assert "toy on 2 cpu ranks: result missing: rank 1 exited with code 0 and left no result" in capsys.readouterr().err


def test_failed_checks_of_the_workload_are_kept_and_reported(toy, capsys):
    detail = {"kind": "all_gather", "iteration": 2, "rank": 1, "layer": 3}
    toy.ranks = {1: {"passed": False, "failure_count": 1, "failures": [detail]}}
    assert run("--trials", "2") == 1
    out = capsys.readouterr().out
    assert "1 of its own checks failed" in out
    assert "all_gather: iteration 2, layer 3, on rank 1" in out
    assert "2 failed" in out.splitlines()[-1]
    assert len(toy.trials()) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_launch_and_keeps_what_is_done(toy, capsys, number, code):
    before = signal.getsignal(signal.SIGTERM)
    toy.before_launch = lambda: len(toy.plans) == 2 and os.kill(os.getpid(), number)
    assert run("--trials", "3") == code
    assert toy.trials() == ["trial_0.json"]
    assert f"ended by {number.name}; finished launches are kept" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_script_gets_its_arguments_and_a_folder_by_its_name(toy):
    (toy.path / "train.py").write_text("")
    assert cli.main(["run", "--script", "train.py", "--gpus", "0", "--nproc", "1", "--", "--lr", "1"]) == 0
    assert (toy.plans[0].args, toy.plans[0].world.size) == (("--lr", "1"), 1)
    assert read_json(toy.path / "results/train/trial_0.json")["config"] == {"args": ["--lr", "1"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--script", "train.py", "--steps", "5"], "--set: a script has no config keys"),
        (["--workload", "toy", "--aorta-gpus", "64"], "--gpus: needs 64 GPUs, 0 visible (--aorta-gpus=64"),
    ],
)
def test_option_that_does_not_fit_the_launch_is_wrong_usage(toy, capsys, arguments, said):
    assert cli.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err
