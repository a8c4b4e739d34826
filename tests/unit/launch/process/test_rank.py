"""The program of a rank, with a function of the test in place of the lifecycle; its signals, errors and imports."""

import gc
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.common.files import without_collection
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.launch.process.rank import write_error
from tests.unit.builders import each_of, make_plan, read_json, run_python

PROGRAM = """
import atexit, os, signal, sys, threading, time, types
from pathlib import Path
from pytest_aorta.launch.process import rank

def run_rank(run_dir, folder, leave):
    {body}

sys.modules["pytest_aorta.worker.lifecycle"] = types.ModuleType("lifecycle")
sys.modules["pytest_aorta.worker.lifecycle"].run_rank = run_rank
rank.main(Path(sys.argv[1]))
"""
FORK = "pid = os.fork()\n    if pid == 0:\n        {child}\n    os.waitpid(pid, 0)"


def run(run_dir: Path, body: str) -> int:
    prepare_folder(make_plan(run_dir))
    environ = os.environ | {"RANK": "0"}
    return run_python("-c", PROGRAM.format(body=body), str(run_dir), env=environ, capture_output=False).returncode


@pytest.mark.parametrize(
    ("child", "said"),
    [("raise ValueError('boom')", "ValueError: boom"), ("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault")],
)
def test_failure_of_a_forked_child_is_in_the_log_and_is_not_that_of_the_rank(tmp_path, child, said):
    assert run(tmp_path, FORK.format(child=child)) == 0
    folder = tmp_path / "ranks" / "0"
    assert said in (folder / "output.log").read_text()
    assert (folder / "stacks.txt").read_text() == ""
    assert not (folder / "error.json").exists()


@pytest.mark.parametrize("body", ["atexit.register(os._exit, 5)", "threading.Thread(target=late, args=(5,)).start()"])
@pytest.mark.parametrize("error", ["", "; sys.exit(3)"])
def test_rank_leaves_as_python_does_with_the_exit_code_of_what_runs_last(tmp_path, body, error):
    late = "late = lambda code: (time.sleep(0.3), os._exit(code))"
    assert run(tmp_path, f"{late}; {body}{error}") == 5


def test_thread_of_a_rank_writes_to_its_end_and_the_exit_code_stays(tmp_path):
    late = f"late = lambda: (time.sleep(0.3), open({str(tmp_path / 'saved')!r}, 'w').close())"
    assert run(tmp_path, f"{late}; threading.Thread(target=late).start(); sys.exit(3)") == 3
    assert (tmp_path / "saved").exists()


def test_thread_that_does_not_end_is_named_and_its_stack_is_in_the_log(tmp_path):
    assert (
        run(tmp_path, "rank.LEAVE_S = 0.5; threading.Thread(target=time.sleep, args=(99,), name='saver').start()") == 1
    )
    error = read_json(tmp_path / "ranks" / "0" / "error.json")
    assert error["message"].startswith("thread saver has not ended within 0.5 s after the script returned")
    assert "in run\n" in (tmp_path / "ranks" / "0" / "output.log").read_text()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_rank_that_has_closed_its_output_succeeds(tmp_path, stream):
    assert run(tmp_path, f"sys.{stream}.close()") == 0


# The code that a rank runs, with the file names of the harness: main() calls run_rank(), which calls runpy.
RANK = "def main(run_rank, script):\n    return run_rank(script)\n"
LIFECYCLE = "import runpy\ndef run_rank(script):\n    return runpy.run_path(script, run_name='__main__')\n"


def script_error(tmp_path: Path, text: str) -> BaseException:
    """Run a script as a rank does, and return the error that it raises with the frames below the test's own."""
    script = tmp_path / "train.py"
    script.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(RANK, "/site/pytest_aorta/launch/process/rank.py", "exec"), names)
    exec(compile(LIFECYCLE, "/site/pytest_aorta/worker/lifecycle.py", "exec"), names)
    with pytest.raises((Exception, SystemExit)) as caught:
        names["main"](names["run_rank"], str(script))
    return caught.value.with_traceback(caught.tb.tb_next)


def left(folder: Path, error: BaseException) -> dict[str, Any]:
    """Return what a rank leaves of its error."""
    write_error(folder, error)
    return read_json(folder / "error.json")


HEAD = "Traceback (most recent call last):\n"


@each_of(
    "script, shown",
    {
        "own frames": (
            "def load():\n    raise ValueError('boom')\nload()\n",
            HEAD + '  File "{0}", line 3, in <module>\n    load()\n'
            "  File \"{0}\", line 2, in load\n    raise ValueError('boom')\nValueError: boom\n",
        ),
        "frames of a library": (
            "import runpy\nrunpy.run_path('/no/such.py')\n",
            HEAD + '  File "{0}", line 2, in <module>\n*in run_path*',
        ),
        "syntax error": ("def main(:\n", '  File "{0}", line 1\n    def main(:\n*SyntaxError: invalid syntax\n'),
    },
)
def test_traceback_begins_with_the_first_frame_of_the_script(tmp_path, script, shown):
    # Python 3.13 marks calls in further lines.
    document = left(tmp_path, script_error(tmp_path, script))
    text = re.sub(r"^ +[~^]+\n", "", document["traceback"], flags=re.MULTILINE)
    assert fnmatch(text, shown.format(tmp_path / "train.py"))
    assert "in run_rank" in document["full_traceback"]


def test_errors_behind_an_error_have_no_frames_of_the_harness(tmp_path):
    caused = RuntimeError("no learning rate")
    caused.__cause__ = script_error(tmp_path, "{}['lr']\n")
    group = ExceptionGroup("two", [script_error(tmp_path, "1 / 0\n"), ValueError("boom")])
    for error, shown in ((caused, "KeyError: 'lr'\n\nThe above exception was the direct cause"), (group, "train.py")):
        text = left(tmp_path, error)["traceback"]
        assert shown in text
        assert not re.search("pytest_aorta/worker|runpy", text)


@pytest.mark.parametrize(("code", "output"), [("3", ""), ("'set DATA_DIR'", "set DATA_DIR\n")])
def test_script_that_exits_writes_what_the_interpreter_would_write(tmp_path, capsys, code, output):
    assert "train.py" in left(tmp_path, script_error(tmp_path, f"raise SystemExit({code})\n"))["traceback"]
    assert capsys.readouterr().err == output


def test_error_is_kept_although_the_script_has_closed_standard_error(tmp_path):
    with redirect_stderr((tmp_path / "closed").open("w")) as stderr:
        stderr.close()
        assert left(tmp_path, ValueError("boom"))["message"] == "boom"


def test_error_without_a_message_is_kept(tmp_path, capsys):
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("code")

    document = left(tmp_path, Broken())
    assert (document["type"], document["message"]) == ("Broken", "(no message: its __str__ raised KeyError)")
    assert "exception str() failed" in capsys.readouterr().err


def test_long_message_does_not_displace_the_frames(tmp_path, capsys):
    text = left(tmp_path, script_error(tmp_path, "raise ValueError('key' * 100_000)\n"))["traceback"]
    assert 'train.py", line 1, in <module>' in text
    assert len(text) < 21_000
    assert len(capsys.readouterr().err) > 300_000


# Programs with the handlers of a rank; the first argument of each is the folder of the rank.
IMPORTS = """
import os, signal, sys, time
from pathlib import Path
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.launch.process.rank import _leave_last_words

stacks = Path(sys.argv[1], "stacks.txt")
"""
INSTALL = """
_leave_last_words(stacks.parent, stacks.open("w"))
"""
INTERRUPTING = """
install = {"signal": signal.signal, "set_wakeup_fd": signal.set_wakeup_fd}

def interrupted(name):
    def call(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return install[name](*args, **kwargs)
    return call

setattr(signal, sys.argv[2], interrupted(sys.argv[2]))
"""


@pytest.mark.parametrize("step", ["signal", "set_wakeup_fd"])
def test_sigterm_that_arrives_while_its_handler_is_installed_ends_the_rank(tmp_path, step):
    program = f"{IMPORTS}{INTERRUPTING}{INSTALL}sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path), step]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        try:
            assert rank.wait(60) == -signal.SIGTERM
        finally:
            rank.kill()


OWN_HANDLER = """
before = signal.getsignal(signal.SIGTERM)

def save(number, frame):
    while "in save" not in stacks.read_text():
        time.sleep(0.01)
    time.sleep(0.5)
    print("saved", flush=True)
    if sys.argv[2] == "exits":
        sys.exit(7)
    if sys.argv[2] == "calls the former handler":
        before(number, frame)

def own_handler_of_child():
    if (child := os.fork()) == 0:
        os._exit(signal.getsignal(signal.SIGTERM) is save)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

signal.signal(signal.SIGTERM, save)
print("child has it:", own_handler_of_child(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[2] == "goes on":
    sys.exit(8)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("after", "status"), [("exits", 7), ("goes on", 8), ("calls the former handler", -signal.SIGTERM)]
)
def test_scripts_own_handler_finishes_its_work_and_decides_what_follows(tmp_path, after, status):
    rank = run_python("-c", IMPORTS + INSTALL + OWN_HANDLER, str(tmp_path), after)
    assert (rank.stdout, rank.returncode) == ("child has it: True\nsaved\n", status)


FORKED = """
ready, has_started = os.pipe()
if (child := os.fork()) == 0:
    os.write(has_started, b".")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), repr(stacks.read_text()))
"""


def test_forked_child_without_a_handler_ends_and_wakes_no_thread_of_the_rank(tmp_path):
    rank = run_python("-c", IMPORTS + INSTALL + FORKED, str(tmp_path), check=True)
    assert rank.stdout == f"{-signal.SIGTERM} ''\n"


@pytest.fixture(autouse=True)
def collector():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collector_is_off_during_imports_and_then_as_before_also_after_a_failure(is_enabled):
    (gc.enable if is_enabled else gc.disable)()

    def importing() -> None:
        with without_collection():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        importing()
    assert gc.isenabled() == is_enabled


# The script's handler of SIGTERM enters a collective, as Lightning's does.
ASKED = """
    def record(**_):
        return json.dumps({{"entries": [{{"collective_seq_id": 5, "profiling_name": name[0], "frames": []}}]}}).encode()
    def reduce_then_leave(*_):
        name[0] = "gloo:broadcast"
        threading.Timer(0.2, os._exit, [0]).start()
    import json, threading, time
    name = ["gloo:all_reduce"]
    sys.modules["torch._C._distributed_c10d"] = types.SimpleNamespace(_dump_fr_trace_json=record)
    signal.signal(signal.SIGTERM, reduce_then_leave)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not (folder / "collectives.json").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_stacks_and_collectives_that_were_asked_for_stay_when_the_rank_is_ended(tmp_path):
    assert run(tmp_path, ASKED.strip().format()) == 0
    folder = tmp_path / "ranks" / "0"
    assert (folder / "stacks.txt").read_text().count("in run_rank") == 1
    entry = {"collective_seq_id": 5, "profiling_name": "gloo:all_reduce"}
    assert read_json(folder / "collectives.json") == {"entries": [entry]}


DIVISION = "ZeroDivisionError: division by zero"
HANDLED = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise SystemExit(1){}\n"


@pytest.mark.parametrize(("raised_from", "after"), [("", DIVISION), (" from error", DIVISION), (" from None", "")])
def test_error_that_a_script_handles_by_exiting_is_kept_unless_the_script_hides_it(tmp_path, raised_from, after):
    document = left(tmp_path, script_error(tmp_path, HANDLED.format(raised_from)))
    assert (document["type"], document["after"]) == ("SystemExit", after)
    assert document["traceback"].endswith(f"{after}\n")
