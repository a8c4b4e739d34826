"""Python environments: what an interpreter has installed, and environments that are built for a side.

An environment is built from a file of requirements, or from the packages of another environment, whose files are linked
and not copied. Some packages can be those of a third environment. uv, or pip where there is no uv, resolves and
installs.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, write_link
from pytest_aorta.common.processes import run_program
from pytest_aorta.plan.cache import command_environment, prepared, run_logged

PROBE_S = 120.0
_PROBE = """
import importlib.util, json, sys

missing = [name for name in ("torch", "pytest_aorta") if importlib.util.find_spec(name) is None]
workloads = {}
if not missing:
    from pytest_aorta.plan.workloads import workload_places
    for name, [place, *_] in workload_places(()).items():
        if place.folder:
            workloads[name] = [str(place.folder), place.module]
folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
known = {"missing": missing, "workloads": workloads, "folders": folders}
print(json.dumps(known | {"prefix": sys.prefix, "version": sys.version.split()[0]}))
"""
# What the ranks of a built environment have to be able to import.
_PROOF = "import torch, pytest_aorta.worker"
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Environment:
    """The packages of an interpreter.

    Attributes:
        python: Path of the interpreter.
        prefix: Its ``sys.prefix``.
        version: Version of Python.
        folders: Folders of installed packages, in the order of its search path.
        harness: Folder with a link to this package, which its launches have first on their search path.
        workloads: Name of each installed workload -> folder and module.
    """

    python: str
    prefix: Path
    version: str
    folders: tuple[Path, ...]
    harness: Path
    workloads: Mapping[str, tuple[Path, str]]

    @cached_property
    def packages(self) -> dict[str, Distribution]:
        """The packages by normalized name."""
        found: dict[str, Distribution] = {}
        for package in distributions(path=[*map(str, self.folders)]):
            if name := package.metadata["Name"]:  # a package that is half removed has none
                found.setdefault(normalized(name), package)
        return found

    @cached_property
    def versions(self) -> dict[str, str]:
        """The version of Python, and of each package."""
        return {"python": self.version} | {name: package.version for name, package in self.packages.items()}

    def state(self) -> list[tuple[str, int]]:
        """Return a value that changes when a package is installed or removed."""
        infos = (entry for folder in self.folders for entry in folder.glob("*-info"))
        return sorted((str(entry), entry.stat().st_mtime_ns) for entry in infos)


def normalized(name: str) -> str:
    """Return the name of a package as it is compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def probe(python: str, root: Path, say: Callable[[str], None]) -> Environment:
    """Return the environment of an interpreter, which has to have torch and what this package needs.

    Raises:
        SpecError: The interpreter does not run, or lacks a package.
    """

    def link(own: Path) -> None:
        own.mkdir()
        write_link(own / PACKAGE_ROOT.name, PACKAGE_ROOT)

    harness = prepared(f"harness-{sha256(str(PACKAGE_ROOT).encode()).hexdigest()[:16]}", link, lambda: "", say)
    environ = without_path(os.environ) | {"PYTHONPATH": str(harness)}
    status, output, complaint = run_program([python, "-P", "-c", _PROBE], environ, PROBE_S, cwd=root)
    if status:
        problem = " ".join(complaint.strip().splitlines()[-1:])
        raise SpecError(f"{python} can't run this version of pytest-aorta: {problem}; install pytest-aorta there")
    found = json.loads(output)
    if missing := found["missing"]:
        raise SpecError(f"{python} can't import {' and '.join(missing)}; install what is missing there")
    workloads = {name: (Path(folder), module) for name, (folder, module) in found["workloads"].items()}
    folders = tuple(map(Path, found["folders"]))
    return Environment(python, Path(found["prefix"]), found["version"], folders, harness, workloads)


def without_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that lead to packages of the environment that pytest runs in."""
    return {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@dataclass(frozen=True)
class Recipe:
    """The parts that an environment is built from.

    Attributes:
        base: The environment whose interpreter it has.
        lock: File whose requirements are installed; None: the packages of ``base``, unless another one is named.
        requirements: Requirements that are installed last.
        other: Environment of the packages ``moved``; None: no package is moved.
        moved: Names of the packages whose files are those of ``other``.
    """

    base: Environment
    lock: Path | None = None
    requirements: tuple[str, ...] = ()
    other: Environment | None = None
    moved: frozenset[str] = frozenset()

    def build(self, root: Path, say: Callable[[str], None]) -> Environment:
        """Return the environment, which is built unless an earlier session has.

        Args:
            root: pytest's root folder, from which paths in requirements start.
            say: Shows a line to the user.

        Raises:
            SpecError: The requirements can't be installed, or ranks can't import what they need.
        """
        lock = self.lock.read_bytes() if self.lock else b""
        sides = [side.state() for side in (self.base, self.other) if side]
        parts = [self.base.python, self.base.version, sides, str(self.lock), sha256(lock).hexdigest()]
        parts += [self.requirements, sorted(self.moved), str(PACKAGE_ROOT)]
        key = sha256(json.dumps(parts).encode()).hexdigest()[:16]
        own = prepared(f"built-{key}", lambda own: self._make(own, root, say), lambda: "", say)
        return probe(str(own / "bin/python"), root, say)

    def _make(self, own: Path, root: Path, say: Callable[[str], None]) -> None:
        if not self.moved:
            say(f"{own}: an environment is built")
        own.mkdir()
        python = str(own / "bin/python")
        run_logged("venv", [self.base.python, "-m", "venv", "--without-pip", str(own)], own, root)
        [packages] = own.glob("lib/python*/site-packages")
        if self.lock is None:
            self._link(packages)
        else:
            _install(f"lock:{self.lock}", ["-r", str(_requirements(self.lock, own, root))], python, own, root)
        if self.requirements:
            wanted = " ".join(f"with:{requirement}" for requirement in self.requirements)
            _install(wanted, self.requirements, python, own, root)
        if self.moved:  # the launch shows whether it starts
            return
        harness = probe(python, root, say).harness
        environ = without_path(os.environ) | {"PYTHONPATH": str(harness)}
        status, _, complaint = run_program([python, "-P", "-c", _PROOF], environ, PROBE_S, cwd=root)
        if status:
            raise SpecError(f"{python} fails at {_PROOF!r}: {' '.join(complaint.strip().splitlines()[-1:])}")

    def _link(self, packages: Path) -> None:
        """Link the files of the packages into a new environment."""
        left_out = set(_files(self.base, self.moved))
        for folder in self.base.folders:
            for place, folders, names in os.walk(folder):
                links = [name for name in folders if Path(place, name).is_symlink()]
                for path in (Path(place, name) for name in (*names, *links)):
                    source = path.parent.parent / f"{path.name.partition('.')[0]}.py"
                    compiled = path.parent.name == "__pycache__" and source in left_out
                    if path not in left_out and not compiled:
                        _link(path, packages / path.relative_to(folder))
        if self.other is not None:
            for path in _files(self.other, self.moved):
                folder = next(folder for folder in self.other.folders if path.is_relative_to(folder))
                _link(path, packages / path.relative_to(folder))


def _files(environment: Environment, names: frozenset[str]) -> Iterator[Path]:
    """Yield the files of packages that are in folders of packages, so without programs."""
    for package in (environment.packages[name] for name in sorted(names & environment.packages.keys())):
        if package.files is None:
            raise SpecError(f"{package.name} {package.version}: its files are not known; install it from a wheel")
        for file in package.files:
            path = Path(os.path.normpath(str(package.locate_file(file))))
            if path.is_file() and any(path.is_relative_to(folder) for folder in environment.folders):
                yield path


def _link(path: Path, to: Path) -> None:
    """Make ``to`` the same file as ``path``, or a copy on another file system, unless there is a file."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        if path.is_symlink():
            return to.symlink_to(path.resolve())
        try:
            to.hardlink_to(path)
        except FileExistsError:
            raise
        except OSError:
            shutil.copy2(path, to)


def _uv() -> str | None:
    return shutil.which("uv", path=command_environment()["PATH"])


def _install(what: str, words: Sequence[str], python: str, own: Path, root: Path) -> None:
    if uv := _uv():
        command = [uv, "pip", "install", "--python", python]
    else:
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check"]
    run_logged(what, [*command, *words], own, root)


def _requirements(lock: Path, own: Path, root: Path) -> Path:
    """Return a lock file as uv and pip can install it."""
    if lock.name != "uv.lock":
        return lock
    if (uv := _uv()) is None:
        raise SpecError(f"lock:{lock}: it needs uv, which is not installed, or not on the path")
    exported = own / "requirements.txt"
    words = ["--frozen", "--no-hashes", "--no-emit-project", "--project", str(lock.parent), "-o", str(exported)]
    run_logged(f"lock:{lock}", [uv, "export", *words], own, root)
    return exported


def version_changes(there: Environment, here: Environment) -> dict[str, str]:
    """Return how versions of Python and of packages differ, by name, as ``there -> here``; torch first."""
    before, after = there.versions, here.versions
    names = sorted(before.keys() | after.keys(), key=lambda name: (name not in ("python", "torch"), name))
    shown = {name: f"{before.get(name, 'absent')} -> {after.get(name, 'absent')}" for name in names}
    return {name: text for name, text in shown.items() if before.get(name) != after.get(name)}


def changes_text(changes: Mapping[str, str]) -> str:
    """Return changes by name as text, the first ones by name; empty without any."""
    parts = [f"{name} {text}" for name, text in changes.items()]
    more = [f"{len(parts) - _MAX_SHOWN} more"] if len(parts) > _MAX_SHOWN else []
    return ", ".join([*parts[:_MAX_SHOWN], *more])
