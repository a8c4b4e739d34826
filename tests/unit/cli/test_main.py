import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.verdict.baseline import StoredLaunch, write_baseline
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


# list


def test_list_has_one_line_a_case_with_its_median(here, capsys):
    head, first, second, totals = said(capsys, "baselines", "list").splitlines()
    assert head.split("  ")[0] == "platform"
    assert first.split() == [
        PLATFORM,
        CASE,
        "1",
        "5/5",
        "5",
        "2026-01-01",
        "to",
        "2026-01-05",
        "10",
        "ms",
    ]
    assert OTHER in second
    assert totals == "2 cases on 1 platform, 6 launches"


def test_list_reports_unreadable_files_beside_readable_ones_and_fails(here, capsys):
    bad = here / "baselines" / PLATFORM / "bad.json"
    bad.write_text("{")
    code, out, err = run(capsys, "baselines", "list")
    assert code == 1
    assert CASE in out
    assert f"{bad.relative_to(here)}: not valid JSON" in err


def test_list_of_an_empty_folder_is_its_totals_and_of_none_is_wrong_usage(here, capsys):
    (here / "empty").mkdir()
    assert said(capsys, "baselines", "list", "--folder", "empty") == "0 cases on 0 platforms, 0 launches\n"
    message = refused(capsys, "baselines", "list", "--folder", "absent")
    assert message.startswith("aorta: absent: there is no such folder of baselines; name it with --folder, or record")
    message = refused(capsys, "baselines", "list", "--platform", "cpu")
    assert f"--platform cpu: is not in baselines; allowed are ['{PLATFORM}']" in message


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"aorta {version('pytest-aorta')}\n"


def test_nothing_is_wider_than_the_terminal(here, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    lines = said(capsys, "baselines", "list").splitlines()
    assert [line for line in lines if len(line) > 90 and " " in line.strip()] == []


# the command itself


@pytest.mark.parametrize("arguments", [[], ["nope"], ["baselines"], ["baselines", "nope"]])
def test_unknown_word_is_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "--help` names what is allowed" in capsys.readouterr().err


def test_module_is_the_command_and_imports_no_torch(here):
    done = run_python("-X", "importtime", "-m", "pytest_aorta.cli", "baselines", "list")
    assert done.returncode == 0
    assert CASE in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_aorta.verdict.baseline" in imported
    assert {name for name in imported if name.partition(".")[0] == "torch"} == set()


def test_reader_that_leaves_early_is_no_traceback(here):
    argv = [sys.executable, "-m", "pytest_aorta.cli", "baselines", "list"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
