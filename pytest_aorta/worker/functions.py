"""The call of a test's function in a rank."""

import ast
import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_aorta.plan.launch_plan import FunctionCall
from pytest_aorta.result.values import read_value
from pytest_aorta.worker.workload import RankEnv


def call_function(call: FunctionCall, file: Path) -> Any:
    """Import the function's module from ``file`` as pytest has imported it, and return what the function returns."""
    sys.path[:] = dict.fromkeys([*call.search_path, *sys.path])
    function = attrgetter(call.name)(_imported(call.module, file))
    arguments = read_value(call.arguments)
    if call.init:
        RankEnv.read().join(call.name)
    return function(*arguments)


def _imported(name: str, file: Path) -> ModuleType:
    from _pytest.assertion.rewrite import rewrite_asserts  # only for a function, whose test file needs pytest

    # Under pytest's `--import-mode=importlib`, the folder of the outermost package is not on the path.
    sys.path.append(str(file.parents[name.count(".")]))
    if package := name.rpartition(".")[0]:
        importlib.import_module(package)
    if name not in sys.modules and (spec := importlib.util.spec_from_file_location(name, file)):
        source = file.read_bytes()
        tree = ast.parse(source, str(file))
        # An assertion that fails shows its values, as in a test.
        rewrite_asserts(tree, source, str(file))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        exec(compile(tree, file, "exec", dont_inherit=True), vars(sys.modules[name]))  # noqa: S102 - imports it
    return sys.modules[name]
