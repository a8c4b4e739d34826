"""``aorta baselines upgrade`` beside a session that updates the same baselines."""

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
    case = make_baseline().case
    write_baseline(tmp_path, stored_baseline(3))
    assert merge_during(tmp_path, "upgrade") == ([0], True)
    left = read_baseline(tmp_path, make_baseline().platform, case)
    assert left is not None
    assert left.launches == stored_baseline(4).launches
    assert [read_baseline_file(path).case for path in tmp_path.glob("*/*.json")] == [case]
