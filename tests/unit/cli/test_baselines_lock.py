"""``aorta baselines move`` beside a session that updates the same baselines."""

import threading
import time
from pathlib import Path

from pytest_aorta.cli import main as cli
from pytest_aorta.verdict.baseline import (
    Baseline,
    StoredLaunch,
    locked_baselines,
    read_baseline,
    read_baseline_file,
    write_baseline,
)
from tests.unit.builders import launches_near, make_baseline, stored

# A command that does not wait for the lock has ended by then.
GRACE_S = 0.5
LIMIT_S = 30.0
MOVE = ("move", "tests/test_a.py", "tests/test_b.py")


def stored_baseline(count: int) -> Baseline:
    """Return a baseline with five launches in the center and ``count`` others."""
    facts = launches_near(10.0, 5 + count, seed=0)
    return make_baseline(launches=(*stored(*facts[:5]), *(StoredLaunch(entry, center=False) for entry in facts[5:])))


def merge_during(folder: Path, *arguments: str) -> tuple[list[int], bool]:
    """Add a launch as a session does at its end, while a command runs; return its exit codes, and if it waited."""
    codes: list[int] = []
    command = threading.Thread(target=lambda: codes.append(cli.main(["baselines", *arguments, f"--folder={folder}"])))
    with locked_baselines(folder):
        command.start()
        time.sleep(GRACE_S)
        has_waited = command.is_alive()
        write_baseline(folder, stored_baseline(4))
    command.join(LIMIT_S)
    return codes, has_waited


def test_launch_that_a_session_adds_meanwhile_is_kept(tmp_path):
    case = "tests/test_b.py::test_x::fsdp"
    write_baseline(tmp_path, stored_baseline(3))
    assert merge_during(tmp_path, *MOVE) == ([0], True)
    left = read_baseline(tmp_path, make_baseline().platform, case)
    assert left is not None
    assert left.launches == stored_baseline(4).launches
    assert [read_baseline_file(path).case for path in tmp_path.glob("*/*.json")] == [case]


def test_dry_run_takes_no_lock(tmp_path):
    write_baseline(tmp_path, stored_baseline(3))
    with locked_baselines(tmp_path):
        assert cli.main(["baselines", *MOVE, "--dry-run", f"--folder={tmp_path}"]) == 0
    assert read_baseline(tmp_path, make_baseline().platform, make_baseline().case) == stored_baseline(3)


def test_folder_that_does_not_exist_is_not_made(tmp_path, capsys):
    folder = tmp_path / "baselines"
    assert cli.main(["baselines", *MOVE, f"--folder={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"aorta: {folder}: there is no such folder of baselines")
    assert not folder.exists()
