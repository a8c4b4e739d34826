import ast
import inspect
import re
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
        EndReason.GUARD_LOST,
        EndReason.NODE_LOST,
        EndReason.NODE_LAUNCHER,
        EndReason.NODE_MISMATCH,
    }
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
