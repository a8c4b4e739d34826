"""The modules of the workloads that import private modules or names of torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

WORKLOADS = Path(__file__).parents[3] / "workloads"
PRIVATE = re.compile(r"(torch|functorch)\b.*\._")


def imported(path):
    """Yield what a module imports, by dotted name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_two_modules_import_private_interfaces_of_torch():
    found = {
        str(path.relative_to(WORKLOADS)) for path in WORKLOADS.rglob("*.py") if any(map(PRIVATE.match, imported(path)))
    }
    assert found == {"common/torch_private.py", "passes/torch_private.py"}
