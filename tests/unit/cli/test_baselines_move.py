from pathlib import Path

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.verdict import baseline as stored_baselines
from pytest_aorta.verdict.baseline import baseline_path, read_baseline_file, write_baseline
from tests.unit.builders import make_baseline

FOLDER = Path("baselines")
PLATFORMS = ("nvidia-h200-x2-nccl", "cpu-x2-gloo")
CASES = (
    "tests/a.py::test_x::fsdp",
    "tests/a.py::test_x[1]::fsdp",
    "tests/a.py::test_xy::fsdp",
    "tests/a.py.bak/b.py::test_z::ddp",
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, with the same four cases on two platforms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for platform in PLATFORMS:
        for case in CASES:
            store(case, platform)
    return tmp_path


def store(case: str, platform: str = PLATFORMS[0]) -> Path:
    return write_baseline(FOLDER, make_baseline(case=case, test=case.rpartition("::")[0], platform=platform))


def cases(platform: str) -> set[str]:
    return {read_baseline_file(path).case for path in (FOLDER / platform).glob("*.json")}


def files() -> dict[Path, str]:
    return {path: path.read_text() for path in FOLDER.rglob("*") if path.is_file()}


def move(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["baselines", "move", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_file_is_renamed_on_all_platforms_with_all_its_tests(capsys):
    code, out, err = move(capsys, "tests/a.py", "tests/unit/c.py")
    assert (code, err) == (0, "")
    moved = {"tests/unit/c.py::test_x::fsdp", "tests/unit/c.py::test_x[1]::fsdp", "tests/unit/c.py::test_xy::fsdp"}
    for platform in PLATFORMS:
        assert cases(platform) == {*moved, CASES[3]}
        assert f"{platform}: tests/a.py::test_x::fsdp -> tests/unit/c.py::test_x::fsdp" in out.splitlines()
    assert out.splitlines()[-1] == "6 of 8 baselines moved"


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("tests/a.py::test_x", "tests/a.py::new", {"tests/a.py::new::fsdp", "tests/a.py::new[1]::fsdp", *CASES[2:]}),
        (CASES[0], "tests/a.py::test_x::renamed", {"tests/a.py::test_x::renamed", *CASES[1:]}),
        ("tests/a.py.bak/", "tests/old/", {*CASES[:3], "tests/old/b.py::test_z::ddp"}),
    ],
    ids=["test with its parameters", "label", "folder"],
)
def test_part_of_a_case_is_renamed_and_not_what_begins_like_it(capsys, old, new, left):
    move(capsys, old, new)
    assert cases(PLATFORMS[0]) == left


def test_one_platform_can_be_renamed_alone(capsys):
    move(capsys, "tests/a.py", "tests/b.py", "--platform", PLATFORMS[1])
    assert cases(PLATFORMS[0]) == set(CASES)
    assert CASES[0] not in cases(PLATFORMS[1])


def test_dry_run_prints_the_renamings_and_changes_nothing(capsys):
    before = files()
    code, out, _ = move(capsys, "tests/a.py", "tests/b.py", "--dry-run")
    assert (code, files()) == (0, before)
    assert out.splitlines()[-1] == "6 of 8 baselines would be moved"
    assert f"{PLATFORMS[1]}: tests/a.py::test_xy::fsdp -> tests/b.py::test_xy::fsdp" in out


@pytest.mark.parametrize("platform", PLATFORMS)
def test_existing_case_is_never_overwritten_and_nothing_is_renamed(capsys, platform):
    store("tests/b.py::test_xy::fsdp", platform)
    before = files()
    code, out, err = move(capsys, "tests/a.py", "tests/b.py")
    assert (code, out, files()) == (1, "", before)
    assert "exists already, so nothing was moved" in err


def test_unknown_old_is_wrong_usage_and_lists_similar_names_if_there_are_any(capsys):
    code, out, err = move(capsys, "tests/a.py::test_xx", "tests/b.py::test_x")
    assert (code, out) == (2, "")
    assert "OLD 'tests/a.py::test_xx' matches none of 8 cases in baselines (did you mean 'tests/a.py::test_x'?)" in err
    assert move(capsys, "zzz", "yyy")[2] == "aorta: OLD 'zzz' matches none of 8 cases in baselines\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tests/a.py", "tests/a.py/", "OLD and NEW are both 'tests/a.py'"),
        ("tests/a.py::test_x", "tests/b.py", "would have no test; give NEW the same parts as OLD"),
    ],
)
def test_names_that_give_no_new_case_are_wrong_usage(capsys, old, new, message):
    before = files()
    code, _, err = move(capsys, old, new)
    assert (code, files()) == (2, before)
    assert message in err


@pytest.mark.parametrize(
    ("name", "said"),
    [("bad.json", "bad.json: not valid JSON"), ("copy.json", "copy.json: the file name is not that of its case")],
)
def test_unreadable_or_misnamed_file_stops_the_renaming(capsys, name, said):
    path = baseline_path(FOLDER, PLATFORMS[0], CASES[0])
    path.with_name(name).write_text("{" if name == "bad.json" else path.read_text())
    before = files()
    code, _, err = move(capsys, "tests/a.py", "tests/b.py")
    assert (code, files()) == (1, before)
    assert said in err
    assert "nothing was moved" in err


FAILING = {
    "write": (stored_baselines, "write_text", OSError(28, "No space left on device")),
    "deletion": (Path, "unlink", OSError(13, "Permission denied")),
}


@pytest.mark.parametrize(("place", "name", "error"), FAILING.values(), ids=FAILING)
def test_failed_write_or_deletion_loses_no_baseline(capsys, monkeypatch, place, name, error):
    before, operation = files(), getattr(place, name)

    def failing(path: Path, *arguments: object, **options: object) -> None:
        if path.suffix == ".json":
            raise error
        operation(path, *arguments, **options)

    monkeypatch.setattr(place, name, failing)
    code, _, err = move(capsys, "tests/a.py", "tests/b.py")
    assert code == 1
    assert files().items() >= before.items()
    assert "moved in part: " in err
