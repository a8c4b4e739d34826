import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.workloads import pinned_cpu_kernels
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import each_of, git, install_torch, rank_values, write, write_ranks
from tests.unit.fake_drivers import FakeNvml

PLAIN = "import torch\n"
SCRIPT = {"train.py": PLAIN}
# A profiled step without communication, in ms.
BUSY = {"step_ms": 10.0, "compute_ms": 6.0, "comm_ms": 0.0, "copy_ms": 0.0, "idle_ms": 4.0, "hidden_comm_ms": 0.0}


Values = Mapping[str, Any]
Ranks = Callable[[LaunchPlan, int], Values]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> Path:
    """The current folder, with a script."""
    monkeypatch.chdir(tmp_path)
    install_torch(tmp_path, monkeypatch)
    nvml.names = ()
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path.parent / "leases"))
    (tmp_path / "train.py").write_text(PLAIN)
    return tmp_path


@pytest.fixture
def gpu(folder: Path, nvml: FakeNvml) -> None:
    nvml.names = ("GPU-0", "GPU-1")


class Launches:
    """The launches that the command has started; ``ranks`` returns what the ranks of a launch leave."""

    def __init__(self) -> None:
        self.plans: list[LaunchPlan] = []
        self.ranks: Ranks = lambda _plan, _number: {}

    def close(self) -> None: ...

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        self.plans.append(plan)
        prepare_folder(plan)
        values = self.ranks(plan, len(self.plans))
        if values.get("fails"):
            for rank in plan.world.ranks:
                (plan.run_dir / "ranks" / str(rank) / "error.json").write_text(
                    f'{{"time_ns": 1, "type": "ValueError", "message": "{values["fails"]}", "traceback": ""}}'
                )
            return LaunchOutcome(EndReason.EXIT, 1, (), (), 0.25)
        environment = {"torch": "2.11.0", "device": plan.world.device}
        write_ranks(plan.run_dir, *([rank_values(environment=environment, metrics={}) | values] * plan.world.size))
        return LaunchOutcome(EndReason.EXIT, 0, (), (), 0.25)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    for name in ("ForkServers", "ColdLauncher"):
        monkeypatch.setattr(f"pytest_aorta.launch.launchers.{name}", lambda *_: launches)
    yield launches
    assert all(plan.record is None or plan.script for plan in launches.plans)


def init(*arguments: str, ends: int = 0) -> None:
    assert main(["init", *(arguments or ["train.py"])]) == ends


def call_in(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keywords of the launch in a test's text."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if getattr(call.func, "attr", "").startswith("run")]
    named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return [ast.literal_eval(argument) for argument in call.args], named


def marks(folder: Path, file: str) -> list[str]:
    """Return the decorators of the test in a file, as the file contains them."""
    [test] = [node for node in ast.parse((folder / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return [ast.unparse(decorator) for decorator in test.decorator_list]


def files(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and "results" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_script_that_repeats_is_tested_bit_by_bit_and_nothing_else_is_written(folder, launches, capsys):
    init("train.py", "--", "--epochs", "it's 2")
    written = files(folder)
    assert written.keys() == {"train.py", "test_train.py", "pytest.ini"}
    record = {"record": {"hash_weights": True}}
    assert call_in(written["test_train.py"]) == (["train.py", ["--epochs", "it's 2"]], record)
    assert len(launches.plans) == 2
    assert (folder / "results" / ".gitignore").read_text() == "*\n"
    assert "aorta_launcher = forkserver" in written["pytest.ini"]
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[:2] == ["wrote test_train.py", "wrote pytest.ini"]
    assert lines[-1].startswith("then: aorta selftest test_train.py ")
    assert "note: weights are compared bit by bit: two launches computed the same" in shown
    assert ("printed losses may differ from plain torchrun's" in shown) == bool(pinned_cpu_kernels())


SEEDED = "the recorder sets seeds and torch.use_deterministic_algorithms in the test's launches, because without them"


@each_of(
    "under_pins, record, said",
    {
        "repeats with seeds": (
            {},
            {"hash_weights": True, "deterministic": True},
            f"{SEEDED} two launches differ in step 3",
        ),
        "never repeats": (None, {}, "weights are not compared: two launches differ in step 3"),
        "fails with seeds": ({"fails": "no deterministic implementation"}, {}, "no deterministic implementation"),
    },
)
def test_script_whose_launches_differ_is_tried_with_seeds(folder, launches, capsys, under_pins, record, said):
    launches.ranks = lambda plan, number: (
        under_pins
        if under_pins is not None and plan.record and plan.record.deterministic
        else {"weight_hashes": {"3": f"{number:016x}"}}
    )
    init()
    text, shown = files(folder)["test_train.py"], capsys.readouterr().out
    assert call_in(text)[1] == {"record": record}
    assert said in shown
    assert ("# The recorder sets seeds" in text) is bool(record)
    assert ("note: weights are not compared: two launches differ in step 3" in shown) is not bool(record)


def test_what_a_script_lacks_is_said_and_seeds_are_not_tried(folder, launches, capsys):
    lacking = {"profile": {"problem": "run 13 more steps"}, "costs": {"problem": "no step"}}
    launches.ranks = lambda *_: {"weight_hashes": {}} | lacking
    init(ends=1)
    shown = capsys.readouterr().out
    assert "next: " not in shown
    for note in (
        "weights are not compared",
        "measured overlap is not compared: run 13",
        "costs of a step are not compared: no",
        "nothing is compared, so the test fails: have the script call recorder.start(warmup=2)",
    ):
        assert f"note: {note}" in shown
    assert len(launches.plans) == 2
    assert call_in(files(folder)["test_train.py"])[1] == {"record": {}}


def test_script_whose_number_of_steps_varies_is_said_to_fail(folder, launches, capsys):
    def ranks(_: LaunchPlan, number: int) -> Values:
        steps = 10 + number
        counts = dict.fromkeys(("configured_iterations", "total_iterations"), steps)
        return counts | {name: [5.0] * steps for name in ("step_times_ms", "loss", "grad_norm")}

    launches.ranks = ranks
    init()
    assert "note: a launch measured 15 steps and the next 16, so the test fails: have " in capsys.readouterr().out


def resuming(folder: Path, kept: str, *, is_seeded: bool = True) -> Ranks:
    """Return the ranks of a script that saves a checkpoint, and goes on with it if it is there."""

    def ranks(plan: LaunchPlan, number: int) -> Values:
        there = plan.folder / kept
        if there.exists():
            return {"fails": "nothing left to train"}
        there.parent.mkdir(exist_ok=True)
        there.write_text("trained")
        is_repeated = is_seeded or (plan.record is not None and plan.record.deterministic)
        return {} if is_repeated else {"weight_hashes": {"3": f"{number:016x}"}}

    return ranks


@pytest.mark.parametrize(("kept", "path"), [("snapshot.pt", "snapshot.pt"), ("out/deep/last.pt", "out")])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_script_that_resumes_is_launched_in_copies_without_its_checkpoint(
    folder, launches, capsys, kept, path, is_seeded
):
    for name, text in (("data/tokens.bin", "1 2 3"), ("results/kept/old", ""), (".git/HEAD", "")):
        write(folder / name, text)
    (folder / kept).parent.parent.mkdir(exist_ok=True)
    seen = []

    def ranks(plan: LaunchPlan, number: int) -> Values:
        seen.append(sorted(str(each.relative_to(plan.folder)) for each in plan.folder.rglob("*") if each.is_file()))
        (plan.folder / kept).parent.mkdir(parents=True, exist_ok=True)
        return resuming(folder, kept, is_seeded=is_seeded)(plan, number)

    launches.ranks = ranks
    init()
    settings = call_in(files(folder)["test_train.py"])[1]
    assert settings["fresh"] == [path]
    assert settings["record"] == {"hash_weights": True} | ({} if is_seeded else {"deterministic": True})
    assert f"runs in a copy of this folder without {path}, which the script writes" in capsys.readouterr().out
    copied = [found for found, plan in zip(seen, launches.plans, strict=True) if plan.copy]
    assert copied == [["data/tokens.bin", "train.py"]] * (2 if is_seeded else 4)
    assert not any(plan.copy.exists() for plan in launches.plans if plan.copy)


def test_checkpoint_that_hides_that_the_script_has_no_seed_is_kept_out(folder, launches, capsys):
    def ranks(plan: LaunchPlan, number: int) -> Values:
        there = plan.folder / "snapshot.pt"
        has_seed = plan.record is not None and plan.record.deterministic
        initial = there.read_text() if there.exists() else f"{0 if has_seed else number:016x}"
        there.write_text(initial)
        return {"weight_hashes": {"3": initial}}

    launches.ranks = ranks
    init()
    settings = call_in(files(folder)["test_train.py"])[1]
    assert settings == {"record": {"hash_weights": True, "deterministic": True}, "fresh": ["snapshot.pt"]}
    assert "note: these launches left files in this folder: snapshot.pt" in capsys.readouterr().out


@each_of(
    "ranks, is_kept_out, said",
    {
        "resumes": ({"weight_hashes": {"3": "e" * 16}}, True, "in a copy of this folder without out, which git does"),
        "needs it": ({"fails": "no data"}, False, "a launch fails without out, which git does not track"),
        "reads nothing": ({}, False, "weights are compared bit by bit"),
    },
)
def test_checkpoint_of_an_earlier_run_is_tried_without(folder, launches, capsys, ranks, is_kept_out, said):
    git(folder, "init", "--quiet")
    for name in ("out/deep/last.pt", "out/.metadata", "data/own.bin"):
        write(folder / name, "trained")
    launches.ranks = lambda plan, _: {} if (plan.folder / "out").exists() else ranks
    init()
    assert call_in(files(folder)["test_train.py"])[1].get("fresh") == (["out"] if is_kept_out else None)
    assert said in capsys.readouterr().out


def test_script_that_fails_is_reported_and_nothing_is_written(folder, launches, capsys):
    launches.ranks = lambda *_: {"fails": "no such dataset"}
    init(ends=1)
    assert "ValueError: no such dataset" in capsys.readouterr().err
    assert files(folder).keys() == {"train.py"}


def test_test_that_exists_is_refused_before_a_launch(folder, launches, capsys):
    (folder / "test_train.py").write_text("mine")
    init(ends=2)
    assert "test_train.py: exists and is not overwritten" in capsys.readouterr().err
    assert (launches.plans, files(folder)) == ([], SCRIPT | {"test_train.py": "mine"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.ini", ""),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = ''\n"),
        ("pyproject.toml", "[tool.pytest]\naddopts = []\n"),
        (".pytest.toml", ""),
        ("setup.cfg", "[tool:pytest]\n"),
        ("tox.ini", "[pytest]\n"),
    ],
)
def test_settings_elsewhere_are_kept_and_no_ini_file_hides_them(folder, capsys, name, text):
    (folder / name).write_text(text)
    init()
    assert (folder / "pytest.ini").exists() is (name == "pytest.ini")
    assert (folder / name).read_text() == text
    assert f"kept {name}, where pytest reads its settings: aorta_launcher (forkserver)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.cfg", "tox.ini"])
def test_settings_of_other_tools_are_none_of_pytest(folder, capsys, name):
    text = "[project]\nname = 'training'\nauthors = 'Sch\xe4fer'\ndependencies = ['pytest']\n[tool.uv.sources]\n"
    (folder / name).write_text(text, encoding="latin-1")
    init()
    assert "wrote pytest.ini" in capsys.readouterr().out


NUMERICS, OVERLAP, WORLD = "pytest.mark.numerics", "pytest.mark.overlap", "pytest.mark.world(size=2)"


def test_without_gpus_the_test_is_of_the_numerics_lane_and_compares_no_times(folder):
    init()
    assert marks(folder, "test_train.py") == [NUMERICS, WORLD]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("times_ms", "marker", "said"),
    [
        ((6.0, 6.01), "3%", "kernel_ms is compared with a tolerance of 3%"),
        ((6.0, 6.02), "5%", "kernel_ms is compared with a tolerance of 5%"),
        ((0.06, 0.06), "5%", "kernel_ms is compared with a tolerance of 5%"),
        ((6.0, 7.0), None, "Times have no marker: kernel_ms of two launches differs by 16.67%"),
        (None, None, "Times have no marker: no kernels were timed"),
    ],
)
def test_on_gpus_times_of_kernels_get_a_tolerance_that_launches_can_decide(folder, launches, times_ms, marker, said):
    launches.ranks = lambda _, number: (
        {"step_times_ms": [10.0, 10.0, 10.0]}
        | (
            {"profile": {"steps": [BUSY], "kernels": {"gemm": {"ms": times_ms[number % 2], "calls": 4.0}}}}
            if times_ms
            else {}
        )
    )
    init()
    tolerance = [f"pytest.mark.tolerance(kernel_ms={marker!r})"] if marker else []
    assert marks(folder, "test_train.py") == [OVERLAP, WORLD, *tolerance]
    assert said in " ".join(files(folder)["test_train.py"].replace("#", "").split())


def test_scripts_of_one_name_in_two_folders_have_a_test_each(folder):
    for name in ("a", "b"):
        write(folder / name / "train.py", PLAIN)
        init(f"{name}/train.py")
    assert {path.name for path in folder.glob("test_*.py")} == {"test_a_train.py", "test_b_train.py"}


@pytest.mark.parametrize("count", [1, 2])
def test_world_of_the_test_fits_the_machine_unless_it_is_given(folder, nvml, count):
    nvml.names = ("GPU-0", "GPU-1")[:count]
    init()
    assert f"pytest.mark.world(size={count})" in marks(folder, "test_train.py")
    (folder / "test_train.py").unlink()
    init("--nproc=1", "train.py")
    assert "pytest.mark.world(size=1)" in marks(folder, "test_train.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a script (.py), a dotted module, or a command after --"),
        (["./train"], "a path ending in .py or a dotted module"),
        (["trian.py"], "there is no file "),
        (["--", "akselerate", "launch"], "'akselerate' is not beside"),
    ],
)
def test_what_can_not_be_launched_is_refused_and_nothing_is_written(folder, capsys, arguments, said):
    assert main(["init", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert files(folder) == SCRIPT


@pytest.mark.parametrize(
    "arguments", [["init", "train.py", "--steps", "50"], ["run", "--script", "train.py", "--steos=5"]]
)
def test_arguments_of_the_script_without_two_dashes_are_refused_with_the_form(folder, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "; arguments of a script or of pytest follow --; `aorta " in capsys.readouterr().err
    assert files(folder).keys() == {"train.py"}


def test_module_is_launched_as_a_module(folder):
    init("installed.train", "--", "--steps", "5")
    assert call_in((folder / "test_installed_train.py").read_text())[0] == ["installed.train", ["--steps", "5"]]


@pytest.mark.parametrize(
    ("given", "file", "words"),
    [
        (["--", "python", "train.py", "--steps=5"], "test_train.py", ["python", "train.py", "--steps=5"]),
        (["--nproc=2", "--", "env", "-u", "X", "python"], "test_env.py", ["env", "-u", "X", "python"]),
        (["--", "python", "test_ops.py"], "test_test_ops.py", ["python", "test_ops.py"]),
    ],
)
def test_command_that_starts_its_own_ranks_is_launched_as_it_is(folder, launches, given, file, words):
    init(*given)
    assert call_in((folder / file).read_text()) == ([words], {"record": {"hash_weights": True}})
    assert [(plan.starts_ranks, [plan.script, *plan.args], plan.launcher) for plan in launches.plans] == [
        (True, words, "torchrun")
    ] * 2
