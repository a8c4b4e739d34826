"""The folder that a session prepares for all sessions, when sessions are killed."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from pytest_aorta.plan.cache import prepared, run_logged
from tests.distributed.processes import await_true

SLOW = """
import sys, time
with open(sys.argv[1], "a", buffering=1) as log:
    print("begun", file=log)
    time.sleep(2)
    print("ended", file=log)
"""


def build(own: Path, log: Path) -> None:
    own.mkdir()
    run_logged("slow", [sys.executable, "-c", SLOW, str(log)], own, own)


def test_program_of_a_killed_session_has_ended_before_the_folder_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log, said = tmp_path / "log", list[str]()
    first = f"""
        from pathlib import Path
        from pytest_aorta.plan.cache import prepared
        from tests.unit.plan.test_cache import build
        prepared("toy", lambda own: build(own, Path({str(log)!r})), print)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(first)], cwd=Path(__file__).parents[3]) as session:
        await_true(log.exists)
        session.send_signal(signal.SIGKILL)
    own = prepared("toy", lambda own: build(own, log), said.append)
    assert log.read_text().split() == ["begun", "ended", "begun", "ended"]
    assert [line.partition(": ")[2] for line in said] == ["it was not finished"]
    assert (own / "ready").is_file()
