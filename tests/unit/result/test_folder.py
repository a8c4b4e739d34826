from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap

from pytest_aorta.launch.process import guard
from pytest_aorta.result import folder
from pytest_aorta.result.outcome import EndReason

NAMES = {value for name, value in vars(folder).items() if name.isupper()}
GUARD = {node.value for node in ast.walk(ast.parse(inspect.getsource(guard))) if isinstance(node, ast.Constant)}


def test_guard_names_files_as_the_run_folder_does():
    strings = {value for value in GUARD if isinstance(value, str)}
    files = {name for name in strings if re.fullmatch(r"[\w-]+\.(log|json|txt)", name)}
    assert {folder.AGENT_LOG, folder.OUTPUT_LOG, folder.ERROR_FILE, folder.RESULT_FILE} <= files <= NAMES
    assert folder.NATIVE_STACKS_FILE in files
    assert {folder.RANKS_FOLDER, f"*/{folder.PID_FILE}"} <= strings


def test_guard_gives_reasons_that_outcomes_have():
    of_other_programs = {
        EndReason.GUARD_LOST, EndReason.NODE_LOST, EndReason.NODE_LAUNCHER, EndReason.NODE_MISMATCH,
    }  # fmt: skip
    assert set(EndReason) - of_other_programs <= GUARD
    for method in (guard.Guard.watch, guard.Guard.marks):
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        returned = {
            node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value
        }
        assert returned
        assert returned <= set(EndReason)


def test_importing_the_names_imports_nothing_but_the_reader_of_files():
    code = (
        "import sys, pytest_aorta.result.folder; print(sorted(m for m in sys.modules if m.startswith('pytest_aorta')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pytest_aorta.result.folder" in shown
    assert not [name for name in ("model", "strict_yaml", "files") if f".{name}'" in shown]


def test_count_of_steps_is_0_where_a_rank_left_none(tmp_path):
    assert folder.steps_entered(tmp_path) == 0


def test_file_of_a_rank_is_distinguished_from_a_file_of_the_launch(tmp_path):
    assert folder.is_rank_file(folder.rank_folder(tmp_path, 3) / folder.RESULT_FILE)
    assert not folder.is_rank_file(tmp_path / folder.RESULT_FILE)
