from __future__ import annotations

import ast
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.plan.device_kind import Device

PLAIN = "import torch\ntorch.manual_seed(0)\n"
DETERMINISTIC = PLAIN + "torch.use_deterministic_algorithms(True)\n"
RECORDED = "from pytest_aorta.worker import recorder\nwith recorder.step():\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pytest_aorta.cli.init.visible_devices", list)
    return tmp_path


@pytest.fixture
def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_aorta.cli.init.visible_devices", lambda: [Device("0", "Toy GPU", "GPU-0")])


def marks(folder: Path, file: str) -> list[str]:
    """Return the decorators of the test in a file, as the file contains them."""
    [test] = [node for node in ast.parse((folder / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return [ast.unparse(decorator) for decorator in test.decorator_list]


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


@pytest.mark.parametrize("name", ['a"""b', "a\\b", "a\nb", 'ends"', "it's"])
def test_any_name_of_a_script_gives_tests_that_parse(folder, name):
    (folder / f"{name}.py").write_text(PLAIN)
    assert main(["init", f"{name}.py"]) == 0
    for path, text in files(folder).items():
        if path.endswith(".py"):
            ast.parse(text)
    (test,) = folder.glob("test_*.py")
    assert f"{name}.py" in str(ast.get_docstring(ast.parse(test.read_text()), clean=False))


def test_gitignore_that_is_a_fifo_or_leads_out_of_the_project_is_refused(folder, capsys, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "ignore"
    outside.write_text("mine")
    for make in (os.mkfifo, lambda path: path.symlink_to(outside)):
        make(folder / ".gitignore")
        assert main(["init"]) == 1
        assert ".gitignore: can't be read: " in capsys.readouterr().err
        assert (outside.read_text(), files(folder)) == ("mine", {} if make is os.mkfifo else {".gitignore": "mine"})
        (folder / ".gitignore").unlink()


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
    ("name", "text", "launcher"),
    [
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = ''\n", '"forkserver"'),
        ("pyproject.toml", "[tool.pytest]\naddopts = []\n", '"forkserver"'),
        ("pytest.toml", "[pytest]\n", '"forkserver"'),
        (".pytest.toml", "", '"forkserver"'),
        ("setup.cfg", "[tool:pytest]\n", "forkserver"),
        ("tox.ini", "[pytest]\n", "forkserver"),
    ],
)
def test_settings_elsewhere_are_kept_and_no_ini_file_hides_them(folder, capsys, name, text, launcher):
    (folder / name).write_text(text)
    assert main(["init"]) == 0
    assert not (folder / "pytest.ini").exists()
    assert (folder / name).read_text() == text
    assert (
        f"kept {name}, which has settings of pytest; add aorta_launcher = {launcher} there to start ranks faster"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("pyproject.toml", "[project]\n"), ("setup.cfg", "[metadata]\n")])
def test_files_without_settings_of_pytest_do_not_count(folder, name, text):
    (folder / name).write_text(text)
    assert main(["init"]) == 0
    assert (folder / "pytest.ini").exists()


NUMERICS, OVERLAP, WORLD = "pytest.mark.numerics", "pytest.mark.overlap", "pytest.mark.world(size=2)"


@pytest.mark.parametrize(("arguments", "file"), [([], "test_training.py"), (["train.py"], "test_train.py")])
def test_without_gpus_the_test_is_of_the_numerics_lane_and_compares_no_times(folder, arguments, file):
    (folder / "train.py").write_text(DETERMINISTIC)
    assert main(["init", *arguments]) == 0
    assert marks(folder, file) == [NUMERICS, WORLD]


@pytest.mark.usefixtures("gpu")
def test_on_gpus_the_test_is_of_the_overlap_lane_and_compares_times(folder):
    (folder / "train.py").write_text(DETERMINISTIC)
    assert main(["init"]) == main(["init", "train.py"]) == 0
    assert marks(folder, "test_training.py") == [OVERLAP, WORLD]
    assert marks(folder, "test_train.py") == [OVERLAP, WORLD, "pytest.mark.tolerance(step_time_p50='5%')"]


SEEDED = "torch.manual_seed(0)\n"
ALGORITHMS = "torch.use_deterministic_algorithms(True)\n"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (SEEDED, "use_deterministic_algorithms(True)"),
        (ALGORITHMS, "manual_seed(SEED)"),
        ("import torch\n", "manual_seed(SEED) and use_deterministic_algorithms(True)"),
    ],
)
def test_weights_that_are_not_compared_are_reported_with_what_to_add(folder, capsys, source, missing):
    (folder / "train.py").write_text(source)
    assert main(["init", "train.py"]) == 0
    note = (
        f"weights are not compared, because train.py does not call torch's {missing}; "
        "add this, then set hash_weights=True in train_measured.py"
    )
    assert f"note: {note}" in capsys.readouterr().out.splitlines()
    written = (folder / "train_measured.py").read_text()
    comment = " ".join(line.removeprefix("# ") for line in written.splitlines() if line.startswith("#"))
    assert comment == f"W{note[1:]}"
    assert max(map(len, written.splitlines())) <= 100


def test_script_that_records_no_weights_is_reported_with_what_to_add(folder, capsys):
    (folder / "train.py").write_text(RECORDED)
    assert main(["init", "train.py"]) == 0
    note = "weights are not compared, because train.py does not call recorder.weights(model)"
    assert f"note: {note}; add this" in capsys.readouterr().out.splitlines()
    assert f"    # W{note[1:]}; add this\n" in (folder / "test_train.py").read_text()


@pytest.mark.parametrize("source", [DETERMINISTIC, f"{RECORDED}recorder.weights(model)\n"])
def test_script_whose_weights_are_compared_gets_no_note(folder, capsys, source):
    (folder / "train.py").write_text(source)
    assert main(["init", "train.py"]) == 0
    assert "not compared" not in "".join([*capsys.readouterr(), *files(folder).values()])


@pytest.mark.parametrize(
    "arguments", [["init", "train.py", "--steps", "50"], ["run", "--script", "train.py", "--steos=5"]]
)
def test_arguments_of_the_script_without_two_dashes_are_refused_with_the_form(folder, capsys, arguments):
    (folder / "train.py").write_text(PLAIN)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "; arguments of the script follow --; " in capsys.readouterr().err
    assert files(folder).keys() == {"train.py"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("train.txt", "allowed is a script ending in .py, or a module, in this folder or below it"),
        ("../outside.py", "allowed is a script ending in .py, or a module, in this folder or below it"),
        (".", "allowed is a script ending in .py, or a module, in this folder or below it"),
        ("trian.py", "trian.py (did you mean 'train.py'?)"),
        ("torchtrain.trian", "there is no file torchtrain/trian.py, also not below src"),
    ],
)
def test_other_scripts_are_refused_and_nothing_is_written(folder, capsys, script, said):
    (folder / "train.py").write_text(PLAIN)
    (folder / "train.txt").write_text("")
    (folder.parent / "outside.py").write_text("")
    before = files(folder)
    assert main(["init", script]) == 2
    assert said in capsys.readouterr().err
    assert files(folder) == before


def test_unreadable_settings_are_an_error(folder, capsys):
    (folder / "pyproject.toml").write_text("[tool.pytest")
    assert main(["init"]) == 1
    assert "pyproject.toml: can't be read" in capsys.readouterr().err
    assert files(folder).keys() == {"pyproject.toml"}


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the folder src, whose module train starts as ``python -m`` starts it."""
    package = folder / "src/torchtrain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("SIZE = 3\n")
    # Would hide the standard library's module if the package's folder were on the path.
    (package / "types.py").write_text("raise ImportError('hidden')\n")
    (package / "train.py").write_text(
        "import pathlib, sys\nfrom .model import SIZE\npathlib.Path('out').write_text(f'{SIZE} {sys.argv}')\n"
    )
    monkeypatch.setitem(sys.modules, "pytest_aorta.worker", SimpleNamespace(record_optimizer_steps=lambda **_: None))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("torchtrain", "torchtrain.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


@pytest.mark.parametrize("given", ["src/torchtrain/train.py", "torchtrain.train"])
def test_module_of_a_package_is_measured_as_a_module(folder, package, monkeypatch, given):
    assert main(["init", given]) == 0
    monkeypatch.setattr(sys, "argv", ["train_measured.py", "--steps=5"])
    runpy.run_path(str(folder / "train_measured.py"), run_name="__main__")
    assert (folder / "out").read_text() == f"3 {[str(package / 'train.py'), '--steps=5']}"
    assert "run_script('train_measured.py')" in (folder / "test_train.py").read_text()


def test_module_with_the_recorder_is_launched_by_its_name(folder, package):
    (package / "train.py").write_text(RECORDED)
    assert main(["init", "src/torchtrain/train.py"]) == 0
    assert "run_script('torchtrain.train')" in (folder / "test_train.py").read_text()
