from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pytest_aorta.cli.main import main

PLAIN = "import torch\ntorch.manual_seed(0)\n"
DETERMINISTIC = PLAIN + "torch.use_deterministic_algorithms(True)\n"
RECORDED = "from pytest_aorta.worker import recorder\nwith recorder.step():\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_without_a_script_the_test_runs_a_built_in_workload(folder, capsys):
    assert main(["init"]) == 0
    written = files(folder)
    assert written.keys() == {"test_training.py", "pytest.ini", ".gitignore"}
    assert 'workload.run("llama_fsdp2"' in written["test_training.py"]
    assert written[".gitignore"] == "results/\n"
    assert "aorta_launcher = forkserver" in written["pytest.ini"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["wrote test_training.py", "wrote pytest.ini", "wrote .gitignore: results/"]


@pytest.mark.parametrize(("source", "hashed"), [(PLAIN, "False"), (DETERMINISTIC, "True")])
def test_script_is_recorded_by_a_second_one_and_hashed_if_it_is_deterministic(folder, source, hashed):
    (folder / "train.py").write_text(source)
    assert main(["init", "train.py", "--", "--epochs", "it's 2"]) == 0
    written = files(folder)
    assert written.keys() == {"train.py", "train_measured.py", "test_train.py", "pytest.ini", ".gitignore"}
    assert written["train.py"] == source
    assert f"hash_weights={hashed}" in written["train_measured.py"]
    calls = [node for node in ast.walk(ast.parse(written["test_train.py"])) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if getattr(call.func, "attr", "") == "run_script"]
    assert [ast.literal_eval(argument) for argument in call.args] == ["train_measured.py", ["--epochs", "it's 2"]]
    ast.parse(written["train_measured.py"])


def test_script_with_the_recorder_is_launched_itself(folder):
    (folder / "scripts").mkdir()
    (folder / "tests").mkdir()
    (folder / "scripts/my-train.py").write_text(RECORDED)
    assert main(["init", "scripts/my-train.py"]) == 0
    assert "run_script('scripts/my-train.py')" in (folder / "tests/test_my_train.py").read_text()
    assert not list(folder.rglob("*_measured.py"))


def test_nothing_that_exists_is_overwritten_and_each_file_is_reported(folder, capsys):
    (folder / "train.py").write_text(PLAIN)
    there = {"test_train.py": "mine", "train_measured.py": "mine", "pytest.ini": "[pytest]\n", ".gitignore": "*.pt"}
    for name, text in there.items():
        (folder / name).write_text(text)
    assert main(["init", "train.py"]) == 0
    assert files(folder) == {**there, "train.py": PLAIN, ".gitignore": "*.pt\nresults/\n"}
    output = capsys.readouterr().out
    for name in ("test_train.py", "train_measured.py", "pytest.ini"):
        assert f"kept {name}, which" in output
    assert "added to .gitignore: results/" in output
    before = files(folder)
    assert main(["init", "train.py"]) == 0
    assert files(folder) == before
    assert "kept .gitignore, which has results/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = ''\n"),
        ("setup.cfg", "[tool:pytest]\n"),
        ("tox.ini", "[pytest]\n"),
    ],
)
def test_settings_elsewhere_are_kept_and_no_ini_file_hides_them(folder, capsys, name, text):
    (folder / name).write_text(text)
    assert main(["init"]) == 0
    assert not (folder / "pytest.ini").exists()
    assert (folder / name).read_text() == text
    assert f"kept {name}, which has settings of pytest" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("pyproject.toml", "[project]\n"), ("setup.cfg", "[metadata]\n")])
def test_files_without_settings_of_pytest_do_not_count(folder, name, text):
    (folder / name).write_text(text)
    assert main(["init"]) == 0
    assert (folder / "pytest.ini").exists()


@pytest.mark.parametrize("script", ["absent.py", "train.txt", "../outside.py", "."])
def test_other_scripts_are_refused_and_nothing_is_written(folder, capsys, script):
    (folder / "train.txt").write_text("")
    (folder.parent / "outside.py").write_text("")
    before = files(folder)
    assert main(["init", script]) == 2
    assert "allowed is a file ending in .py in this folder or below it" in capsys.readouterr().err
    assert files(folder) == before


def test_unreadable_settings_are_an_error(folder, capsys):
    (folder / "pyproject.toml").write_text("[tool.pytest")
    assert main(["init"]) == 1
    assert "pyproject.toml: can't be read" in capsys.readouterr().err
    assert files(folder).keys() == {"pyproject.toml"}
