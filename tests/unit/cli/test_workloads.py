"""`aorta workloads`."""

import pytest

from pytest_aorta.cli import main as cli

YAML = """
description: a toy
class: Toy
min_world_size: 3
config:
  size: {type: string, enum: [small, large], default: small, description: preset}
  rate: {type: [number, "null"], exclusiveMinimum: 0, maximum: 1, default: null, description: a rate}
  fault: {type: object, default: {}, description: a fault, properties: {kind: {type: string, default: none}}}
presets: {size: {large: {rate: 0.5}}}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "workloads" / "toy"
    folder.mkdir(parents=True)
    (folder / "default.yaml").write_text(YAML)
    return tmp_path


def test_list_has_built_in_and_own_workloads_and_reports_those_that_can_not_be_read(own, capsys):
    (own / "workloads" / "bad").mkdir()
    (own / "workloads" / "bad" / "default.yaml").write_text("clas: x")
    assert cli.main(["workloads"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith(("fsdp", "toy"))] == [
        ["fsdp", "torchrun", "2"],
        ["toy", "torchrun", "3"],
    ]
    assert "unknown key 'clas'" in out


@pytest.mark.parametrize("arguments", [["workloads"], ["workloads", "fsdp"], ["run", "--workload", "fsdp"]])
def test_folder_of_own_workloads_that_does_not_exist_is_wrong_usage(own, capsys, arguments):
    assert cli.main([*arguments, "--workloads", "wrkloads"]) == 2
    assert "--workloads: there is no folder " in capsys.readouterr().err


def test_one_workload_has_its_keys_with_type_default_limits_and_help(own, capsys):
    assert cli.main(["workloads", "toy"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        'size = "small"  {"type": "string", "enum": ["small", "large"]}',
        "    preset",
        'rate = null  {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}',
        "    a rate",
        'fault = {}  {"type": "object", "properties": {"kind": {"type": "string", "default": "none"}}}',
        "    a fault",
        'environment = {}  {"type": "object", "additionalProperties": {"type": "string"}}',
        "    environment variables of the ranks",
        'size = large changes defaults: {"rate": 0.5}',
    ]
