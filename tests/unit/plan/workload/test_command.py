"""Workloads that are a command: the values that their yaml may contain, and the plan that results."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.workloads import command_line, filled_adapter, read_workload, resolve_config

COMMAND = """
description: a script
command:
  script: train.py
  args: ["--steps={steps}", {when: compile, args: [--compile, "{mode}"]}, "{run_dir}/x"]
  environment: {SLEEP_S: "{sleep_s}"}
adapter: {kind: log, pattern: 'step (?P<step>[0-9]{1,9}) (?P<step_time_ms>[0-9.]+)', warmup: "{warmup}"}
config:
  steps: {type: integer, default: 10, description: steps}
  warmup: {type: integer, default: 1, description: left out}
  compile: {type: boolean, default: false, description: whether}
  mode: {type: string, default: fast, description: how}
  sleep_s: {type: number, default: 0.5, description: rest}
"""


def command_spec(tmp_path, text=COMMAND):
    folder = tmp_path / "titan"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("")
    (folder / "default.yaml").write_text(text)
    return read_workload("titan", folder, None)


def spec_error(tmp_path, text) -> str:
    with pytest.raises(SpecError) as caught:
        command_spec(tmp_path, text)
    return str(caught.value)


def lined(tmp_path, **config):
    spec = command_spec(tmp_path)
    command = spec.command
    return command_line(command, resolve_config(spec, config), folder=spec.folder, run_dir=Path("/run"))


def test_command_is_filled_in_with_the_config(tmp_path):
    line = lined(tmp_path)
    assert line.target == str(tmp_path / "titan" / "train.py")
    assert line.args == ("--steps=10", "/run/x")
    assert line.environment == {"SLEEP_S": "0.5"}


def test_arguments_with_a_condition_are_there_where_it_holds(tmp_path):
    assert lined(tmp_path, compile=True).args == ("--steps=10", "--compile", "fast", "/run/x")


def test_adapter_is_filled_in_for_each_rank(tmp_path):
    adapter = filled_adapter(command_spec(tmp_path), {"warmup": 4}, Path("/run"), 1)
    assert (adapter.kind, adapter.warmup, adapter.ranks) == ("log", 4, "all")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("script: train.py", "script: other.py", "there is no file"),
        ("script: train.py", "scrip: train.py", "$.command: unknown key 'scrip' (did you mean 'script'?)"),
        ("script: train.py", "module: a-b", '$.command.module: got "a-b"'),
        (
            "{steps}",
            "{step}",
            "command: names ['step'] can't be filled in (did you mean 'steps'?); there are ['compile', ",
        ),
        (
            "when: compile",
            "when: comp",
            "command: when: no config key 'comp' (did you mean 'compile'?); there are ['compile', 'environment'",
        ),
        ('"{warmup}"', '"{warm}"', "adapter: names ['warm'] can't be filled in"),
        ('"{warmup}"', '"many"', "adapter: warmup: got 'many', allowed is an integer"),
        (
            "{SLEEP_S:",
            "{LD_PRELOAD: x, CUDA_VISIBLE_DEVICES: '7', AORTA_LAUNCH_ID: '', LD_LIBRARY_PATH: y, SLEEP_S:",
            "command.environment: got ['AORTA_LAUNCH_ID', 'CUDA_VISIBLE_DEVICES', 'LD_PRELOAD']; a command may set any",
        ),
        (
            "kind: log",
            "kind: logs",
            "$.adapter.kind: got \"logs\"; Invalid enum value 'logs'",
        ),
        ("(?P<step>", "(?P<stepp>", "it has to have a group (?P<step>...)"),
        ("step_time_ms", "speed", "step times are missing: none of "),
        ("step (?P", "step ((?P", "is not a regular expression"),
        ("kind: log,", "kind: torchtitan,", "kind torchtitan has its own pattern and scalars; drop them"),
        ("description: a script", "description: a script\nclass: Toy", "one of the keys 'class' and 'command'"),
    ],
)
def test_wrong_command_or_adapter_says_what_is_allowed(tmp_path, old, new, said):
    text = COMMAND.replace(old, new)
    assert text != COMMAND
    assert said in spec_error(tmp_path, text)


def test_adapter_without_a_command_is_refused(tmp_path):
    text = (
        COMMAND.replace("command:", "class: Toy\npresets: {}\nx:").split("x:")[0] + COMMAND[COMMAND.index("adapter:") :]
    )
    assert "adapter belongs to a command" in spec_error(tmp_path, text)


def test_neither_class_nor_command_is_refused(tmp_path):
    text = "description: a toy\nconfig: {}\n"
    assert "give one of the keys 'class' and 'command', not both" in spec_error(tmp_path, text)


def test_example_of_torchtitan_can_be_read():
    folder = Path(__file__).parents[4] / "docs" / "examples" / "torchtitan" / "workloads" / "titan"
    spec = read_workload("titan", folder, None)
    config = resolve_config(spec, {"deterministic": False, "steps": 7})
    line = command_line(spec.command, config, folder=folder, run_dir=Path("/run"))
    assert line.target == "torchtitan.train"
    assert "--training.steps=7" in line.args
    assert "--debug.deterministic" not in line.args
    assert filled_adapter(spec, config, Path("/run"), 1).folder == "/run/titan/tb/*/rank_1"
