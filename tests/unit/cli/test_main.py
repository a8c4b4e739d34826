import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.verdict.baseline import StoredLaunch, baseline_path, read_baseline_file, write_baseline
from tests.unit.builders import make_baseline, make_facts, run_python, with_p50

CASE = "tests/test_a.py::test_x::fsdp"
OTHER = "tests/test_b.py::test_y::ddp"
PLATFORM = "nvidia-h200-x2-nccl"
P50S = (10.0, 10.1, 9.9, 10.05, 9.95)


def launch(p50: float, day: int = 1, *, center: bool = True, revision: int = 1, **changes) -> StoredLaunch:
    facts = with_p50(make_facts(measured_at=f"2026-01-{day:02d}T03:04:05Z", **changes), p50)
    return StoredLaunch(facts, revision, center)


def launches(*p50s: float, **changes) -> tuple[StoredLaunch, ...]:
    return tuple(launch(p50, day, **changes) for day, p50 in enumerate(p50s, 1))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with two baselines, wide output and leases of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    store(launches=launches(*P50S))
    store(case=OTHER, test=OTHER.rpartition("::")[0], launches=launches(20.0))
    return tmp_path


def store(**changes) -> Path:
    return write_baseline(Path("baselines"), make_baseline(**changes))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def said(capsys, *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("aorta: ")
    return err


# baselines


def test_baselines_of_a_moved_test_are_moved_to_its_place(here, capsys):
    old = next(path for path in here.glob("baselines/*/*.json") if f'"{CASE}"' in path.read_text())
    file = CASE.partition("::")[0]
    old.write_text(old.read_text().replace(file, "tests/unit/moved.py"))
    out = said(capsys, "baselines", "upgrade")
    assert not old.exists()
    new = baseline_path(Path("baselines"), PLATFORM, CASE.replace(file, "tests/unit/moved.py"))
    assert str(new) in out.splitlines()
    assert read_baseline_file(new).test == CASE.replace(file, "tests/unit/moved.py").rpartition("::")[0]


def test_no_stored_case_is_overwritten_by_a_file_of_another_place(here, capsys):
    paths = {str(path): path.read_text() for path in Path("baselines").glob("*/*.json")}
    copy = Path("baselines", PLATFORM, "copy.json")
    copy.write_text(next(iter(paths.values())))
    code, _, err = run(capsys, "baselines", "upgrade")
    assert code == 1
    assert f"{copy}: stays as it is, since {next(iter(paths))}, the place of its case, exists already" in err
    assert copy.exists()


def test_baselines_beside_unreadable_ones_are_rewritten_and_the_command_fails(here, capsys):
    bad = here / "baselines" / PLATFORM / "bad.json"
    bad.write_text("{")
    code, out, err = run(capsys, "baselines", "upgrade")
    assert (code, len(out.splitlines())) == (1, 2)
    assert f"{bad.relative_to(here)}: not valid JSON" in err


def test_folder_of_baselines_that_does_not_exist_is_wrong_usage_and_an_empty_one_is_said(here, capsys):
    message = refused(capsys, "baselines", "upgrade", "--folder", "absent")
    assert message.startswith("aorta: absent: there is no such folder of baselines; name it with --folder, or record")
    assert not Path("absent").exists()
    Path("none").mkdir()
    assert said(capsys, "baselines", "add", "none") == "nothing was added: none has no baseline\n"


# the command itself


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--version"], 0, f"aorta {version('pytest-aorta')}\n"),
        (
            ["arrange", "--other='", "a.py"],
            2,
            '--other: got "\'", allowed are words, quoted as for a shell (No closing',
        ),
        (["devices"], 2, "devices: use aorta doctor"),  # a subcommand of version 0.1
        *(
            (words, 2, "--help` names what is allowed")
            for words in ([], ["nope"], ["baselines"], ["baselines", "nope"])
        ),
    ],
)
def test_version_is_shown_and_an_unknown_word_is_wrong_usage(capsys, arguments, code, says):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == code
    assert says in (err if code else out)


def test_module_is_the_command_and_imports_no_torch(here):
    done = run_python("-X", "importtime", "-m", "pytest_aorta.cli", "baselines", "upgrade")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_aorta.verdict.baseline" in imported
    assert {name for name in imported if name.partition(".")[0] == "torch"} == set()


def test_reader_that_leaves_early_is_no_traceback(here):
    argv = [sys.executable, "-m", "pytest_aorta.cli", "baselines", "upgrade"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
