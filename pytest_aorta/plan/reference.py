"""The reference version of the code, for launches that are compared with those of the code under test.

A commit, whose launches run present rank code on a worktree's workloads, scripts and packages; or another
environment's interpreter, whose launches run what is installed there.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT
from pytest_aorta.common.programs import run_program
from pytest_aorta.plan.options import PYTHON_PREFIX
from pytest_aorta.plan.workload.declaration import WorkloadSpec, package_folder, read_workload
from pytest_aorta.plan.worktree import Worktree, open_worktree

PROBE_S = 120.0
# Folders that come after all others on a rank's search path.
_PROBE = """
import importlib.util, json
missing = [name for name in ("torch", "pytest_aorta") if importlib.util.find_spec(name) is None]
workloads = {}
if not missing:
    from pytest_aorta.plan.workload.declaration import workload_places
    for name, [place, *_] in workload_places(()).items():
        if place.folder:
            workloads[name] = [str(place.folder), place.module]
print(json.dumps({"missing": missing, "workloads": workloads}))
"""


@dataclass(frozen=True)
class Reference(ABC):
    """What a launch of the reference differs in.

    Attributes:
        name: as given to ``--aorta-ab``.
        python: the interpreter of its agent and ranks.
        root: the folder they run in, which stands for pytest's root folder.
    """

    name: str
    python: str
    root: Path

    @abstractmethod
    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` with the search path of the reference's packages."""

    @abstractmethod
    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Its version of a workload; raises SpecError where it has none of that name."""

    @abstractmethod
    def script(self, script: str) -> str:
        """Its version of a script; raises SpecError where it has none."""

    @abstractmethod
    def document(self) -> dict[str, str]:
        """What ``plan.json`` says of it."""


@dataclass(frozen=True)
class CommitReference(Reference):
    """A commit of the repository under test."""

    worktree: Worktree

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Its root folder and ``src/`` come before any install of the checkout, and ours before all."""
        folders = [self.worktree.packages, self.root / "src", self.root]
        # What the caller names of the checkout is the code under test.
        callers = (Path(entry) for entry in environ.get("PYTHONPATH", "").split(":") if entry)
        folders += [self.worktree.counterpart(entry) if entry.is_absolute() else entry for entry in callers]
        return {**environ, "PYTHONPATH": ":".join(str(folder) for folder in folders)}

    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """A workload of the repository's is the commit's, any other stays what it is."""
        folder = self.worktree.counterpart(spec.folder)
        if folder == spec.folder:
            return spec
        if not folder.is_dir():
            raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: there is no {folder}")
        if spec.module is not None:
            self._redirect(spec.module.partition(".")[0])
        return read_workload(spec.name, folder, spec.module)

    def script(self, script: str) -> str:
        """A file of the repository's is the commit's; modules are found on the search path."""
        path = self.worktree.counterpart(Path(script)) if script.endswith(".py") else Path(script)
        if path != Path(script) and not path.is_file():
            raise SpecError(f"script {script!r} does not exist at {self.name}: there is no {path}")
        return str(path)

    def document(self) -> dict[str, str]:
        """Name, commit and folders."""
        folders = {"root": str(self.root), "checkout": str(self.worktree.checkout)}
        return {"name": self.name, "commit": self.worktree.commit, **folders}

    def _redirect(self, package: str) -> None:
        # A package may be called otherwise than its folder, so that no folder on the search path would lead to it.
        folder, link = package_folder(package), self.worktree.packages / package
        if folder is not None and not link.is_symlink():
            link.symlink_to(self.worktree.counterpart(folder), target_is_directory=True)


@dataclass(frozen=True)
class EnvironmentReference(Reference):
    """Another environment; ``installed``: its workloads' names -> folder and module."""

    installed: Mapping[str, tuple[Path, str]] = field(compare=False)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What is installed there comes before what the caller and the root folder have."""
        late = ":".join(filter(None, [environ.get("PYTHONPATH"), str(self.root)]))
        return {**_without_path(environ), variables.LATE_PATH: late}

    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """An installed workload is the one installed there; one of the user's folders stays what it is."""
        if spec.module is None:
            return spec
        if spec.name not in self.installed:
            there = sorted(self.installed)
            raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: it has {there} installed")
        return read_workload(spec.name, *self.installed[spec.name])

    def script(self, script: str) -> str:
        """The same."""
        return script

    def document(self) -> dict[str, str]:
        """Name and interpreter."""
        return {"name": self.name, "python": self.python}


class References:
    """The reference of a session, opened when it is first asked for."""

    def __init__(self, name: str | None, rootdir: Path) -> None:
        self._name = name
        self._rootdir = rootdir
        self._reference: Reference | None = None
        self._opened = ExitStack()

    def open(self) -> Reference:
        """The reference that ``--aorta-ab`` names.

        Raises:
            SpecError: it names none, or none that can be used.
        """
        if self._reference is None:
            if self._name is None:
                raise SpecError("there is no reference version to launch; name one with --aorta-ab=REF")
            try:
                self._reference = self._open(self._name)
            except SpecError as error:
                raise SpecError(f"--aorta-ab={self._name}: {error}") from None
        return self._reference

    def close(self) -> None:
        """Remove what was checked out."""
        self._reference = None
        self._opened.close()

    def _open(self, name: str) -> Reference:
        if name.startswith(PYTHON_PREFIX):
            # Not resolved: a virtual environment's interpreter is a link to the one it was made with.
            python = self._rootdir / Path(name.removeprefix(PYTHON_PREFIX)).expanduser()
            return EnvironmentReference(name, str(python), self._rootdir, _probe(str(python)))
        worktree = self._opened.enter_context(open_worktree(self._rootdir, name))
        try:
            return _commit_reference(name, self._rootdir, worktree)
        except BaseException:
            self._opened.close()
            raise


def _commit_reference(name: str, rootdir: Path, worktree: Worktree) -> CommitReference:
    root = worktree.tree / rootdir.resolve().relative_to(worktree.checkout)
    if not root.is_dir():
        raise SpecError(f"pytest's root folder does not exist there: {root.relative_to(worktree.tree)}")
    # Ranks run the very harness that pytest runs, also where the repository has one of its own.
    (worktree.packages / PACKAGE_ROOT.name).symlink_to(PACKAGE_ROOT, target_is_directory=True)
    return CommitReference(name, sys.executable, root, worktree)


def _probe(python: str) -> dict[str, tuple[Path, str]]:
    """The workloads that another interpreter's environment has installed."""
    status, output, complaint = run_program([python, "-P", "-c", _PROBE], _without_path(os.environ), PROBE_S)
    if status:
        raise SpecError(f"{python} is no usable interpreter: {' '.join(complaint.strip().splitlines()[-1:])}")
    found = json.loads(output)
    if missing := found["missing"]:
        raise SpecError(f"{python} can't import {' and '.join(missing)}; install what is missing there")
    return {name: (Path(folder), module) for name, (folder, module) in found["workloads"].items()}


def _without_path(environ: Mapping[str, str]) -> dict[str, str]:
    # They name packages of the environment that pytest runs in.
    return {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
