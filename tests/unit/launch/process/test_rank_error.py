from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.launch.process.rank import shown_traceback, write_error

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


def test_traceback_begins_with_the_first_frame_of_the_script(tmp_path):
    error = script_error(tmp_path, "def load():\n    raise ValueError('boom')\nload()\n")
    assert shown_traceback(error) == (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/train.py", line 3, in <module>\n'
        "    load()\n"
        f'  File "{tmp_path}/train.py", line 2, in load\n'
        "    raise ValueError('boom')\n"
        "ValueError: boom\n"
    )


def test_frames_of_libraries_after_the_scripts_own_are_kept(tmp_path):
    text = shown_traceback(script_error(tmp_path, "import json, runpy\nrunpy.run_path('/no/such.py')\n"))
    assert text.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 2, in <module>\n')
    assert "in run_path" in text


def test_script_that_can_not_be_compiled_has_its_line_and_no_frame(tmp_path):
    text = shown_traceback(script_error(tmp_path, "def main(:\n"))
    assert text.startswith(f'  File "{tmp_path}/train.py", line 1\n    def main(:\n')
    assert text.endswith("SyntaxError: invalid syntax\n")


def test_errors_that_led_to_the_error_have_no_frames_of_the_harness(tmp_path):
    inner = script_error(tmp_path, "{}['lr']\n")
    try:
        raise RuntimeError("no learning rate") from inner
    except RuntimeError as caught:
        text = shown_traceback(caught)
    assert "pytest_aorta/worker" not in text
    assert "runpy" not in text
    assert "KeyError: 'lr'\n\nThe above exception was the direct cause" in text


def test_members_of_a_group_have_no_frames_of_the_harness(tmp_path):
    text = shown_traceback(ExceptionGroup("two", [script_error(tmp_path, "1 / 0\n"), ValueError("boom")]))
    assert "runpy" not in text
    assert "train.py" in text


def test_file_has_the_shown_and_the_full_traceback(tmp_path, capsys):
    error = script_error(tmp_path, "raise ValueError('boom')\n")
    write_error(tmp_path, error)
    document = json.loads((tmp_path / "error.json").read_text())
    assert (document["type"], document["message"]) == ("ValueError", "boom")
    assert document["traceback"] == shown_traceback(error) == capsys.readouterr().err
    assert "in run_rank" in document["full_traceback"]


@pytest.mark.parametrize(("code", "output"), [("3", ""), ("'set DATA_DIR'", "set DATA_DIR\n")])
def test_script_that_exits_writes_what_the_interpreter_would_write(tmp_path, capsys, code, output):
    write_error(tmp_path, script_error(tmp_path, f"raise SystemExit({code})\n"))
    assert capsys.readouterr().err == output
    assert "train.py" in json.loads((tmp_path / "error.json").read_text())["traceback"]


def test_error_is_kept_although_the_script_has_closed_standard_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", (tmp_path / "closed").open("w"))
    sys.stderr.close()
    write_error(tmp_path, ValueError("boom"))
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "boom"


def test_error_without_a_message_is_kept(tmp_path, capsys):
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("code")

    write_error(tmp_path, Broken())
    document = json.loads((tmp_path / "error.json").read_text())
    assert (document["type"], document["message"]) == ("Broken", "(no message: its __str__ raised KeyError)")
    assert "exception str() failed" in capsys.readouterr().err


def test_long_message_does_not_displace_the_frames(tmp_path, capsys):
    write_error(tmp_path, script_error(tmp_path, "raise ValueError('key' * 100_000)\n"))
    text = json.loads((tmp_path / "error.json").read_text())["traceback"]
    assert 'train.py", line 1, in <module>' in text
    assert len(text) < 21_000
    assert len(capsys.readouterr().err) > 300_000
