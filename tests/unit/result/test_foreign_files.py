"""Files of a rank that are not regular files: a FIFO or a link under any name never blocks the reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aorta.result import folder as names
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.evidence import read_evidence
from pytest_aorta.result.outcome import EndReason, LaunchOutcome, phases_s
from tests.unit.builders import make_plan, write_plan_file

NAMES = [
    names.PID_FILE,
    names.MARKS_FILE,
    names.PROGRESS_FILE,
    names.OUTPUT_LOG,
    names.STACKS_FILE,
    names.ERROR_FILE,
    names.IN_FLIGHT_FILE,
    names.RESULT_FILE,
]
LIMIT_S = 60


def read_everything(run_dir: Path) -> None:
    """Read all files that pytest reads of a failed launch."""
    write_plan_file(run_dir)
    plan = make_plan(run_dir)
    read_evidence(plan)
    phases_s(names.rank_folders(run_dir, range(2)), 0.0, 1.0)
    assert launch_failure(plan, LaunchOutcome(EndReason.TIME_LIMIT, None, (), (), 1.0)) is not None


@pytest.mark.parametrize("name", NAMES)
def test_fifo_does_not_block_the_diagnosis(tmp_path, name):
    folder = names.rank_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    os.mkfifo(folder / name)
    code = "import sys; from pathlib import Path; from tests.unit.result.test_foreign_files import read_everything as r"
    command = [sys.executable, "-c", f"{code}; r(Path(sys.argv[1]))", str(tmp_path)]
    # A separate process, because only its end stops a wait for the FIFO's writer.
    subprocess.run(command, cwd=Path(__file__).parents[3], timeout=LIMIT_S, check=True)


def test_link_of_a_rank_is_not_followed(tmp_path):
    folder = names.rank_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text('{"type": "secret", "message": "", "traceback": "", "time_ns": 1}\n')
    for name in (names.ERROR_FILE, names.OUTPUT_LOG, names.STACKS_FILE):
        (folder / name).symlink_to(tmp_path / "secret")
    rank = read_evidence(make_plan(tmp_path))[1]
    assert (rank.error, rank.log_tail, rank.frames) == (None, (), ())
