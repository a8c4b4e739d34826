from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_aorta.cli import devices as devices_command
from pytest_aorta.cli import main as cli
from pytest_aorta.launch.leases import bad_marks, lease, mark_bad
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.verdict.baseline import StoredLaunch, read_baseline, read_baseline_file, write_baseline
from tests.unit.builders import make_baseline, make_facts, with_p50

CASE = "tests/test_a.py::test_x::fsdp"
OTHER = "tests/test_b.py::test_y::ddp"
PLATFORM = "nvidia-h200-x2-nccl"
P50S = (10.0, 10.1, 9.9, 10.05, 9.95)


def launch(p50: float, day: int = 1, *, center: bool = True, revision: int = 1, **changes) -> StoredLaunch:
    facts = with_p50(make_facts(recorded_at=f"2026-01-{day:02d}T03:04:05Z", **changes), p50)
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


def thinnable(count: int = 6) -> Path:
    """Store the first case with a center of two launches in revision 2 and ``count`` launches of revision 1."""
    old = tuple(launch(10.0, day, center=False) for day in range(1, count + 1))
    new = tuple(launch(10.0, day, revision=2) for day in (20, 21))
    return store(launches=(*old, *new), forced={"1": "a noisy day", "2": "again"})


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


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


# list


def test_list_has_one_line_a_case_with_center_and_detection(here, capsys):
    head, first, second, totals = said(capsys, "baselines", "list").splitlines()
    assert head.split("  ")[0] == "platform"
    assert first.split() == [
        PLATFORM, CASE, "1", "5/5", "5", "2026-01-01", "to", "2026-01-05", "10", "ms", *first.split()[-2:],
    ]  # fmt: skip
    assert all(cell.strip(",").endswith("%") for cell in first.split()[-2:])
    assert OTHER in second
    assert totals == "2 cases on 1 platform, 6 launches"


def test_list_counts_launches_of_one_day_as_one_block(here, capsys):
    store(launches=(launch(10.0), launch(10.1)))
    assert "2/2         1       2026-01-01 " in said(capsys, "baselines", "list", "--platform", PLATFORM)


def test_list_reports_unreadable_files_beside_readable_ones_and_fails(here, capsys):
    bad = here / "baselines" / PLATFORM / "bad.json"
    bad.write_text("{")
    code, out, err = run(capsys, "baselines", "list")
    assert code == 1
    assert CASE in out
    assert f"{bad.relative_to(here)}: not valid JSON" in err


def test_list_of_another_folder_takes_only_the_platform_asked_for(here, capsys):
    write_baseline(here / "elsewhere", make_baseline(platform="cpu-x2-gloo"))
    write_baseline(here / "elsewhere", make_baseline())
    out = said(capsys, "baselines", "list", "--folder", "elsewhere", "--platform", "cpu-x2-gloo")
    assert PLATFORM not in out
    assert "1 case on 1 platform, 1 launch" in out


def test_list_of_an_empty_folder_is_its_totals(here, capsys):
    (here / "empty").mkdir()
    assert said(capsys, "baselines", "list", "--folder", "empty") == "0 cases on 0 platforms, 0 launches\n"


def test_list_of_no_folder_is_wrong_usage(here, capsys):
    assert refused(capsys, "baselines", "list", "--folder", "absent") == (
        "aorta: absent: there is no such folder of baselines; name it with --folder, or record baselines with "
        "pytest --update-baselines\n"
    )


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"aorta {version('pytest-aorta')}\n"


def test_unknown_platform_is_wrong_usage_and_names_those_that_are_there(here, capsys):
    assert f"--platform cpu: is not in baselines; allowed are ['{PLATFORM}']" in refused(
        capsys, "baselines", "list", "--platform", "cpu"
    )


def test_list_in_a_narrow_terminal_shortens_the_case(here, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "130")
    lines = said(capsys, "baselines", "list").splitlines()
    assert max(map(len, lines)) <= 130
    assert len(lines) == 4
    assert "...py::test_x::fsdp" in lines[1]


@pytest.mark.parametrize("arguments", [("list",), ("show", CASE), ("diff", "HEAD:", "HEAD:")])
def test_nothing_is_wider_than_the_terminal(here, capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "90")
    path = next((here / "baselines" / PLATFORM).glob("*test-x*")).relative_to(here)
    arguments = [argument.replace("HEAD:", str(path)) for argument in arguments]
    lines = said(capsys, "baselines", *arguments).splitlines()
    assert [line for line in lines if len(line) > 90 and " " in line.strip()] == []


def test_control_characters_of_a_case_are_escaped(here, capsys):
    store(case="tests/test_a.py::test_x[\x1b[2J]", launches=launches(10.0))
    assert "test_x[\\x1b[2J]" in said(capsys, "baselines", "list")


# show


def test_show_has_metrics_launches_config_environment_and_reasons(here, capsys):
    facts = make_facts(
        metrics={"peak_memory_bytes": 2.0**30, "num_parameters": 7.0},
        rank_lag_ms=[0.0, 1.5],
        canary_ms={"gemm_ms": 2.0},
        step_time_growth=0.03,
    )
    store(launches=(StoredLaunch(facts),), forced={"1": "a noisy day"})
    out = said(capsys, "baselines", "show", "test_x")
    for part in (
        "revision 1: 1 of 1 launch in the center, 1 block, recorded 2026-01-02",
        "peak_memory_bytes  1024 MiB",
        "num_parameters     7 ",
        "equal in all launches",
        "2026-01-02T03:04:05Z  0123456789ab  torchrun  20     10      12      +3.00%  rank 1: 1.5 ms   gemm 2 ms",
        '  dtype: "float32"',
        '  torch: "2.11.0"',
        "  revision 1: a noisy day",
    ):
        assert part in out
    [exact] = [line for line in out.splitlines() if line.strip().startswith("num_parameters")]
    assert exact.split() == ["num_parameters", "7", "-", "-", "-", "equal", "in", "all", "launches"]


def test_show_has_the_version_of_the_code_of_each_launch(here, capsys):
    commit = "c0ffee00" * 5
    versions = [{"commit": commit, "branch": "main", "dirty": False}, {"commit": commit, "dirty": True}, {}]
    store(launches=tuple(StoredLaunch(make_facts(**version)) for version in versions))
    rows = said(capsys, "baselines", "show", CASE).splitlines()
    assert [re.split(" {2,}", row.strip())[-2:] for row in rows if "  torchrun  " in row] == [
        ["c0ffee00c0ff", "main"],
        ["c0ffee00c0ff and changes", "-"],
        ["-", "-"],
    ]


def test_show_has_the_provenance_of_the_last_launch(here, capsys):
    environment = {"torch": "2.11.0", "device": "cuda", "device_name": "NVIDIA H200"}
    made = {"commit": "c0ffee00" * 5, "branch": "main", "dirty": True, "environment": environment}
    store(launches=(StoredLaunch(make_facts(command=["pytest", "-m", "overlap or speed"], **made)),))
    shown = said(capsys, "baselines", "show", CASE).partition("provenance of the last launch:\n")[2]
    assert shown.splitlines()[:6] == [
        "  commit: c0ffee00c0ff and changes",
        "  branch: main",
        "  measured: 2026-01-02T03:04:05Z",
        "  device: NVIDIA H200",
        "  torch: 2.11.0",
        "  command: pytest -m 'overlap or speed'",
    ]


def test_show_marks_a_variance_that_the_baseline_has_not_shown(here, capsys):
    out = said(capsys, "baselines", "show", OTHER)
    row = next(line for line in out.splitlines() if line.startswith("  step_time_p50"))
    assert row.count("*") == 2
    assert "* not measured by this baseline yet" in out


def test_show_of_many_blocks_marks_no_variance_between_them(here, capsys):
    row = next(line for line in said(capsys, "baselines", "show", CASE).splitlines() if "step_time_p50" in line)
    within, between = row.split()[4:6]
    assert within.endswith("*")  # one launch per block
    assert not between.endswith("*")


def test_show_of_exact_values_that_differ_says_so(here, capsys):
    hashes = [make_facts(weight_hashes={"9": digit * 16}) for digit in "ab"]
    store(launches=tuple(map(StoredLaunch, hashes)))
    assert "2 different values" in said(capsys, "baselines", "show", CASE)


def test_show_takes_a_path(here, capsys):
    path = store(launches=launches(11.0))
    assert " 11 ms " in said(capsys, "baselines", "show", path)


def test_show_takes_a_whole_case_that_is_part_of_another(here, capsys):
    store(case=f"{CASE}::long", launches=launches(30.0))
    assert said(capsys, "baselines", "show", CASE).splitlines()[0] == CASE


def test_ambiguous_part_of_a_case_lists_the_matches(here, capsys):
    text = refused(capsys, "baselines", "show", "tests/")
    assert "matches 2 cases" in text
    assert CASE in text
    assert OTHER in text


def test_part_of_no_case_is_wrong_usage(here, capsys):
    assert "'nope' is not a file and not part of any of 2 cases in" in refused(capsys, "baselines", "show", "nope")


def test_show_of_an_unreadable_path_is_a_problem(here, capsys):
    (here / "bad.json").write_text("{}")
    code, out, err = run(capsys, "baselines", "show", "bad.json")
    assert (code, out) == (1, "")
    assert "bad.json: schema_version is None" in err


# diff


@pytest.fixture
def committed(here):
    """The path in the repository of a baseline that was committed and then recorded again."""
    git("init", "-q")
    git("add", "baselines")
    git("commit", "-qm", "one")
    environment = {"torch": "2.12.0", "device": "cuda", "device_name": "NVIDIA H200"}
    new = launches(*(1.2 * p50 for p50 in P50S), environment=environment, weight_hashes={"9": "1" * 16, "10": "f" * 16})
    return store(launches=new, config={"steps": 20, "dtype": "bfloat16", "seed": 0})


def test_diff_with_a_commit_shows_config_environment_metrics_and_hashes(committed, capsys):
    out = said(capsys, "baselines", "diff", f"HEAD:{committed}", committed)
    for part in (
        f"A: HEAD:{committed}, revision 1: 5 of 5 launches in the center",
        '  dtype: "float32" -> "bfloat16"',
        "  seed: absent -> 0",
        '  torch: "2.11.0" -> "2.12.0"',
        "+20.0%  beyond the uncertainty",
        "weight hashes: differ from step 10 on, 000000000000 -> ffffffffffff",
    ):
        assert part in out
    row = next(line for line in out.splitlines() if "step_time_p50" in line)
    assert row.split()[1:6:3] == ["10", "12"]
    assert row.count("+-") == 2


def test_diff_with_the_index_takes_an_empty_ref(committed, capsys):
    assert '"2.11.0" -> "2.12.0"' in said(capsys, "baselines", "diff", f":{committed}", committed)


def test_diff_of_a_path_from_the_current_folder(committed, capsys, monkeypatch):
    monkeypatch.chdir(committed.parent)
    assert "beyond" in said(capsys, "baselines", "diff", f"HEAD:./{committed.name}", committed.name)


def test_diff_of_one_file_with_itself_is_equal(committed, capsys):
    out = said(capsys, "baselines", "diff", committed, committed)
    assert "config: equal\nenvironment: equal\n" in out
    assert "weight hashes: equal in 2 steps with a hash in both" in out
    assert "uncertainty" not in out
    assert "differs" not in out


def test_diff_of_two_cases_names_them(here, capsys):
    first, second = sorted((here / "baselines" / PLATFORM).iterdir())
    assert f'case: "{CASE}" -> "{OTHER}"' in said(capsys, "baselines", "diff", first, second)


def test_small_change_is_within_the_uncertainty(committed, capsys):
    new = store(launches=launches(*(1.001 * p50 for p50 in P50S)))
    assert "within the uncertainty" in said(capsys, "baselines", "diff", f"HEAD:{committed}", new)


def test_diff_without_common_hashes_says_so(committed, capsys):
    new = store(launches=launches(*P50S, weight_hashes={}))
    out = said(capsys, "baselines", "diff", f"HEAD:{committed}", new)
    assert "weight hashes: no step has a hash in both" in out
    assert "differs" in next(line for line in out.splitlines() if "weight_hash " in line)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope:x", "invalid object name 'nope'"),
        ("HEAD:nope.json", "path 'nope.json' does not exist in 'HEAD'"),
        ("HEAD:baselines", "bad file"),
        ("nope", "'nope' is not a file; a file of a commit is given as REF:PATH"),
        ("--output=/tmp/x:y", "a git ref does not begin with '-'"),
    ],
)
def test_what_git_does_not_have_is_wrong_usage(committed, capsys, name, message):
    assert message in refused(capsys, "baselines", "diff", "--", name, committed)


def test_file_of_a_commit_that_is_no_baseline_is_a_problem(committed, capsys):
    Path("note").write_text("no json")
    git("add", "note")
    code, _, err = run(capsys, "baselines", "diff", ":note", committed)
    assert code == 1
    assert ":note: not valid JSON" in err


def test_ref_never_reaches_a_shell(committed, capsys):
    refused(capsys, "baselines", "diff", "$(touch planted):x;touch planted", committed)
    assert not Path("planted").exists()


# prune


def test_prune_drops_the_oldest_launches_outside_the_center(here, capsys):
    path = thinnable()
    out = said(capsys, "baselines", "prune", "--keep", "2")
    assert out.splitlines() == [f"dropped 4 of 8 launches of {path}", "1 of 2 files changed"]
    left = [stored.facts.recorded_at[8:10] for stored in read_baseline_file(path).launches]
    assert left == ["05", "06", "20", "21"]


def test_prune_to_none_keeps_the_center_launches_and_their_reason_alone(here, capsys):
    path = thinnable()
    said(capsys, "baselines", "prune", "--keep", "0")
    baseline = read_baseline_file(path)
    assert all(stored.center for stored in baseline.launches)
    assert baseline.forced == {"2": "again"}


def test_prune_keeps_forty_by_default(here, capsys):
    path = thinnable(19)
    before = path.read_bytes()
    assert said(capsys, "baselines", "prune") == "0 of 2 files changed\n"
    assert path.read_bytes() == before


def test_dry_run_reports_and_changes_nothing(here, capsys):
    path = thinnable()
    before = path.read_bytes()
    out = said(capsys, "baselines", "prune", "--keep", "0", "--dry-run")
    assert f"would have dropped 6 of 8 launches of {path}" in out
    assert path.read_bytes() == before


@pytest.mark.parametrize("count", ["-1", "x", "1.5"])
def test_keep_takes_whole_numbers(here, capsys, count):
    with pytest.raises(SystemExit) as caught:
        cli.main(["baselines", "prune", f"--keep={count}"])
    assert caught.value.code == 2
    assert f"got '{count}', allowed is an integer of 0 or more" in capsys.readouterr().err


def test_file_whose_test_file_is_gone_goes_only_with_orphans(here, capsys):
    (here / "tests").mkdir()
    (here / "tests" / "test_a.py").touch()
    assert said(capsys, "baselines", "prune") == "0 of 2 files changed\n"
    out = said(capsys, "baselines", "prune", "--orphans")
    assert "deleted baselines" in out
    assert "the test file of tests/test_b.py::test_y does not exist" in out
    assert read_baseline(Path("baselines"), PLATFORM, CASE)
    assert read_baseline(Path("baselines"), PLATFORM, OTHER) is None


def test_dry_run_deletes_no_orphan(here, capsys):
    (here / "root" / "tests").mkdir(parents=True)
    (here / "root" / "tests" / "test_a.py").touch()
    out = said(capsys, "baselines", "prune", "--orphans", "--rootdir", "root", "--dry-run")
    assert "would have deleted" in out
    assert read_baseline(Path("baselines"), PLATFORM, OTHER)


def test_root_folder_with_no_test_file_deletes_nothing(here, capsys):
    text = refused(capsys, "baselines", "prune", "--orphans")
    assert "contains the test file of none of the 2 baselines" in text
    assert len(list((here / "baselines" / PLATFORM).iterdir())) == 2


def test_prune_leaves_a_renamed_file_as_it_is_and_fails(here, capsys):
    path = thinnable()
    renamed = path.rename(path.with_name("renamed.json"))
    before = renamed.read_bytes()
    code, _, err = run(capsys, "baselines", "prune", "--keep", "0")
    assert code == 1
    assert f"{renamed}: left unchanged: the file name is not that of its case" in err
    assert renamed.read_bytes() == before
    assert not path.exists()


def test_prune_never_leaves_the_folder_through_a_link(here, capsys):
    (here / "tests").mkdir()
    (here / "tests" / "test_b.py").touch()
    folder = here / "baselines" / PLATFORM
    outside = folder.rename(here / "outside")
    folder.symlink_to(outside, target_is_directory=True)
    code, _, err = run(capsys, "baselines", "prune", "--orphans")
    assert code == 1
    assert "is a link out of baselines" in err
    assert len(list(outside.iterdir())) == 2


# history


def fake_otava(*indices: int) -> ModuleType:
    module = ModuleType("otava.analysis")
    points = [SimpleNamespace(index=index) for index in indices]
    module.compute_change_points = lambda values, max_pvalue: (points, None)  # type: ignore[attr-defined]
    return module


def test_history_has_a_line_for_each_stretch(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "otava", ModuleType("otava"))
    monkeypatch.setitem(sys.modules, "otava.analysis", fake_otava(2))
    store(launches=(*launches(10.0, 10.0, center=False), launch(11.0, 3, revision=2)))
    head, _, first, second = said(capsys, "baselines", "history", CASE).splitlines()
    assert head == f"{CASE}, step_time_p50: 1 change in 3 launches"
    assert first.split() == ["1-2", "1", "2026-01-01T03:04:05Z", "2026-01-02T03:04:05Z", "10", "ms", "-"]
    assert second.split()[-3:] == ["11", "ms", "+10.0%"]


def test_history_finds_a_step_with_otava_itself(here, capsys):
    pytest.importorskip("otava", reason="needs pytest-aorta[history]")
    store(launches=(*launches(*P50S, *P50S), *(launch(1.2 * p50, 20) for p50 in (*P50S, *P50S))))
    assert "1 change in 20 launches" in said(capsys, "baselines", "history", CASE)


def test_history_without_otava_says_how_to_install_it(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "otava.analysis", None)  # also where it was imported before
    assert "pip install 'pytest-aorta[history]'" in refused(capsys, "baselines", "history", CASE)


def test_history_of_an_unknown_metric_names_those_there_are(here, capsys):
    assert "allowed are ['all_gather" in refused(capsys, "baselines", "history", CASE, "--metric", "speed")


def test_history_of_a_metric_that_launches_lack_is_refused(here, capsys):
    text = refused(capsys, "baselines", "history", CASE, "--metric", "tokens_per_s")
    assert "tokens_per_s is a positive number in only 0 of 5 launches" in text


# devices


@pytest.fixture
def gpus(monkeypatch):
    devices = [Device(str(number), "NVIDIA H200", f"GPU-{number:04d}") for number in range(3)]
    monkeypatch.setattr(devices_command, "visible_devices", lambda: devices)
    return devices


def test_devices_are_listed_with_holder_and_mark(here, gpus, capsys):
    mark_bad("GPU-0002", "pid 7 can't be killed")
    with lease(["GPU-0000", "cpu-0"], 2, exclusive=False, wait_s=0, owner="tests/test_a.py::test_x"):
        lines = said(capsys, "devices", "list").splitlines()
    assert "held by tests/test_a.py::test_x (pid" in lines[1]
    assert lines[2].split() == ["1", "GPU-0001", "NVIDIA", "H200", "free"]
    assert lines[3].endswith("bad: pid 7 can't be killed")
    assert lines[4].startswith("-      cpu-0")
    assert lines[5] == "3 GPUs visible, 2 resources leased, 1 marked bad"


@pytest.mark.parametrize("token", ["GPU-0002", "2"])
def test_bad_mark_is_cleared_by_name_and_by_number(here, gpus, capsys, token):
    mark_bad("GPU-0002", "stuck")
    assert said(capsys, "devices", "clear-bad", token) == "GPU-0002 can be leased again; the mark was: stuck\n"
    assert bad_marks() == {}


def test_clearing_what_is_not_marked_names_what_is(here, gpus, capsys):
    mark_bad("GPU-0002", "stuck")
    assert "'1' is not marked bad; marked are: GPU-0002" in refused(capsys, "devices", "clear-bad", "1")
    assert bad_marks() == {"GPU-0002": "stuck"}


# the command itself


@pytest.mark.parametrize("arguments", [[], ["nope"], ["baselines"], ["baselines", "nope"], ["devices"]])
def test_unknown_word_is_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "--help` names what is allowed" in capsys.readouterr().err


def test_unknown_option_is_reported_by_the_word_it_was_typed_after(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--workload", "fsdp", "--seps", "3"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said == "aorta run: error: unrecognized arguments: --seps; `aorta run --help` names what is allowed\n"


def test_module_is_the_command_and_imports_no_torch(here):
    argv = [sys.executable, "-X", "importtime", "-m", "pytest_aorta.cli", "baselines", "list"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert CASE in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_aorta.cli.baselines.show" in imported
    assert {name for name in imported if name.partition(".")[0] == "torch"} == set()


def test_reader_that_leaves_early_is_no_traceback(here):
    argv = [sys.executable, "-m", "pytest_aorta.cli", "baselines", "list"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_output_that_knows_only_ascii_gets_escapes(here, monkeypatch):
    store(case="tests/test_a.py::test_ü", launches=launches(10.0))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    argv = [sys.executable, "-m", "pytest_aorta.cli", "baselines", "list"]
    assert "test_\\xfc" in subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
