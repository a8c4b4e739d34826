"""Python environments: what an interpreter has installed, and environments that are built for a side.

An environment is built from a file of requirements, or from the packages of another environment, whose files are linked
and not copied. uv, or pip where there is no uv, resolves and installs. A mixture of two environments has what they have
in common, built once, and a folder for each other package, which comes first on the search path.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, write_link
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import some_of
from pytest_aorta.plan.cache import PACKAGES, command_environment, name_of, prepared, run_logged

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
# Prints the modules that ranks have before they run code of the user.
_LOADED = """
import importlib, json, sys
from pytest_aorta.launch.process.forkserver import PRELOADED

for name in PRELOADED:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
# Folders of libraries that torch loads without an import.
_LIBRARIES = "nvidia"
# What the ranks of a built environment have to be able to import.
_PROOF = "import torch, pytest_aorta.worker; print(1)"
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
        early: Folders of single packages that come before ``folders`` from the start of a process.
        late: Likewise, but ranks add them just before they run code of the user.
    """

    python: str
    prefix: Path
    version: str
    folders: tuple[Path, ...]
    harness: Path
    workloads: Mapping[str, tuple[Path, str]]
    early: tuple[Path, ...] = ()
    late: tuple[Path, ...] = ()

    @cached_property
    def packages(self) -> dict[str, Distribution]:
        """The packages by normalized name."""
        found: dict[str, Distribution] = {}
        for package in distributions(path=[*map(str, (*self.early, *self.late, *self.folders))]):
            if name := package.metadata["Name"]:  # a package that is half removed has none
                found.setdefault(canonicalize_name(name), package)
        return found

    @cached_property
    def versions(self) -> dict[str, str]:
        """The version of Python, and of each package."""
        return {"python": self.version} | {name: package.version for name, package in self.packages.items()}

    def state(self) -> list[tuple[str, int]]:
        """Return a value that changes when a package is installed or removed."""
        infos = (entry for folder in self.folders for entry in folder.glob("*-info"))
        return sorted((str(entry), entry.stat().st_mtime_ns) for entry in infos)


def probe(python: str, root: Path, say: Callable[[str], None]) -> Environment:
    """Return the environment of an interpreter, which has to have torch and what this package needs.

    Raises:
        SpecError: The interpreter does not run, or lacks a package.
    """

    def link(own: Path) -> None:
        own.mkdir()
        write_link(own / PACKAGE_ROOT.name, PACKAGE_ROOT)

    harness = prepared(name_of("harness", str(PACKAGE_ROOT)), link, say)
    found = _printed(python, _PROBE, harness, root, "can't run this version of pytest-aorta, so install it there")
    if missing := found["missing"]:
        raise SpecError(f"{python} can't import {' and '.join(missing)}; install what is missing there")
    workloads = {name: (Path(folder), module) for name, (folder, module) in found["workloads"].items()}
    folders = tuple(map(Path, found["folders"]))
    return Environment(python, Path(found["prefix"]), found["version"], folders, harness, workloads)


def _printed(python: str, program: str, harness: Path, root: Path, problem: str) -> Any:
    """Return the JSON that a program of an environment prints last."""
    environ = without_path(os.environ) | {"PYTHONPATH": str(harness)}
    status, output, complaint = run_program([python, "-P", "-c", program], environ, PROBE_S, cwd=root)
    if status:
        raise SpecError(f"{python} {problem}: {' '.join(complaint.strip().splitlines()[-1:])}")
    return json.loads(output.splitlines()[-1])


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
        without: Names of the packages of ``base`` that are left out.
    """

    base: Environment
    lock: Path | None = None
    requirements: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()

    def build(self, root: Path, say: Callable[[str], None]) -> Environment:
        """Return the environment, which is built unless an earlier session has.

        Args:
            root: pytest's root folder, from which paths in requirements start.
            say: Shows a line to the user.

        Raises:
            SpecError: The requirements can't be installed, or ranks can't import what they need.
        """
        return probe(str(self.folder(root, say) / "bin/python"), root, say)

    def folder(self, root: Path, say: Callable[[str], None]) -> Path:
        """Return the folder of the environment, as in :meth:`build`."""
        lock = self.lock and self.lock.read_text("utf-8", "surrogateescape")
        parts = [self.base.python, self.base.version, self.base.state(), str(self.lock), lock]
        name = name_of("built", *parts, self.requirements, sorted(self.without), str(PACKAGE_ROOT))
        return prepared(name, lambda own: self._make(own, root, say), say)

    def _make(self, own: Path, root: Path, say: Callable[[str], None]) -> None:
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
        if self.without:  # perhaps without torch
            return
        _printed(python, _PROOF, probe(python, root, say).harness, root, f"fails at {_PROOF!r}")

    def _link(self, packages: Path) -> None:
        """Link the files of the packages into a new environment."""
        left_out = {path for name in sorted(self.without) for path in _files(self.base, name)}
        for folder in self.base.folders:
            for place, folders, names in os.walk(folder):
                links = [name for name in folders if Path(place, name).is_symlink()]
                for path in (Path(place, name) for name in (*names, *links)):
                    source = path.parent.parent / f"{path.name.partition('.')[0]}.py"
                    compiled = path.parent.name == "__pycache__" and source in left_out
                    if path not in left_out and not compiled:
                        _link(path, packages / path.relative_to(folder))


@dataclass(frozen=True)
class Mixture:
    """Two environments whose differing packages can be mixed.

    Attributes:
        good, bad: The environments.
        names: The packages that differ.
        root, say: As in :meth:`Recipe.build`.
    """

    good: Environment
    bad: Environment
    names: Sequence[str]
    root: Path
    say: Callable[[str], None]

    def environment(self, moved: frozenset[str]) -> Environment:
        """Return the environment in which the packages ``moved`` are those of the bad one, by a search path alone.

        Raises:
            SpecError: The files of a package are not known.
        """
        sides = {name: self.bad if name in moved else self.good for name in self.names}
        folders = {name: _package(side, name, self.say) for name, side in sides.items() if name in side.packages}
        modules = {name: _modules(folder) for name, folder in folders.items()}
        early = tuple(folders[name] for name in folders if not self._loaded.isdisjoint(modules[name]))
        late = tuple(folder for folder in folders.values() if folder not in early)
        theirs = set().union(*(modules[name] for name in moved & folders.keys()))
        found = {name: place for name, place in self.bad.workloads.items() if re.split("[.:]", place[1])[0] in theirs}
        return replace(self._common, early=early, late=late, workloads={**self.good.workloads, **found})

    @cached_property
    def _common(self) -> Environment:
        """The environment of the packages that do not differ."""
        own = Recipe(self.good, without=frozenset(self.names)).folder(self.root, self.say)
        folders = tuple(own.glob("lib/python*/site-packages"))
        return replace(self.good, python=str(own / "bin/python"), prefix=own, folders=folders)

    @cached_property
    def _loaded(self) -> set[str]:
        """The modules that ranks have before they run code of the user, so that a later entry of the path is late."""
        found = {_LIBRARIES}
        for side in (self.good, self.bad) if "torch" in self.names else (self.good,):
            found |= set(_printed(side.python, _LOADED, side.harness, self.root, "can't import torch"))
        return found


def _package(environment: Environment, name: str, say: Callable[[str], None]) -> Path:
    """Return a folder with the files of one package alone."""

    def make(own: Path) -> None:
        for path in _files(environment, name):
            folder = next(folder for folder in environment.folders if path.is_relative_to(folder))
            _link(path, own / PACKAGES / path.relative_to(folder))

    made_of = name_of("package", str(environment.prefix), environment.state(), name)
    return prepared(made_of, make, say) / PACKAGES


def _modules(folder: Path) -> set[str]:
    """Return the names of the modules of the first level in a folder."""
    return {entry.name.partition(".")[0] for entry in folder.iterdir() if not entry.name.endswith("-info")}


def _files(environment: Environment, name: str) -> Iterator[Path]:
    """Yield the files of a package that are in folders of packages, so without programs."""
    if (package := environment.packages.get(name)) is None:
        return
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


def releases_of(package: str, root: Path, *, pre: bool) -> list[str]:
    """Return the versions of a package that the index of the user's pip has, the oldest first; ``pre``: unfinished too.

    Raises:
        SpecError: pip is not installed, or knows none.
    """
    words = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    words += ["--pre"] if pre else []
    status, output, complaint = run_program(words, command_environment(), PROBE_S, cwd=root)
    listed = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
    if status or listed is None:
        raise SpecError(f"pip index versions {package}: {' '.join(complaint.strip().splitlines()[-1:])}")
    return sorted(listed[1].split(", "), key=Version)


# Labels of addresses in the metadata of a package (PEP 753), the surest first.
_REPOSITORY = ("source", "repository", "sourcecode", "github", "homepage")


def repository_of(package: str, environment: Environment) -> str:
    """Return the address of a package's repository.

    Raises:
        SpecError: The package is not installed, or its metadata name none.
    """
    installed = environment.packages.get(package)
    links = (installed.metadata.get_all("Project-URL") if installed else None) or []
    known = {re.sub(r"\W", "", label).lower(): url.strip() for label, _, url in (link.partition(",") for link in links)}
    for label in filter(known.__contains__, _REPOSITORY):
        return str(known[label])
    raise SpecError(f"{package} is not installed, or names no repository; write {package}@git+URL@GOOD..BAD")


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
    return some_of([f"{name} {text}" for name, text in changes.items()], _MAX_SHOWN)
