"""A/B references: the other version of the code, whose launches are compared with those of the code under test.

An A/B reference is a commit, whose launches run the present rank code on the workloads, scripts and packages of a
worktree; or the interpreter of another environment, whose launches run the code installed there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, write_link
from pytest_aorta.common.model import Model
from pytest_aorta.common.processes import run_program
from pytest_aorta.plan.options import PYTHON_PREFIX
from pytest_aorta.plan.workloads import WorkloadSpec, package_folder, read_workload
from pytest_aorta.plan.worktree import NO_SETUP, Setup, Worktree, commit_of, open_worktree

PROBE_S = 120.0
_PROBE = """
import importlib.util, json

missing = [name for name in ("torch", "pytest_aorta") if importlib.util.find_spec(name) is None]
workloads = {}
if not missing:
    from pytest_aorta.plan.workloads import workload_places
    for name, [place, *_] in workload_places(()).items():
        if place.folder:
            workloads[name] = [str(place.folder), place.module]
print(json.dumps({"missing": missing, "workloads": workloads}))
"""


class Reference(Model, frozen=True, tag_field="kind"):
    """The properties of a launch that differ for an A/B reference.

    Attributes:
        name: Text given to ``--aorta-ab``.
        python: Interpreter of the torchrun agent and the ranks.
        root: Folder in which the agent and the ranks run, the counterpart of pytest's root folder.
    """

    name: str
    python: str
    root: Path

    @property
    def commit(self) -> str | None:
        """The full hash of the commit whose code is launched; None if the code belongs to no known commit."""
        return None


class CommitReference(Reference, frozen=True, tag="commit"):
    """A commit of the repository under test."""

    worktree: Worktree

    @property
    def commit(self) -> str:
        """The full hash of the commit."""
        return self.worktree.commit

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Put this package, then the commit's ``src/`` and root folder, before any install of the checkout."""
        folders = [self.worktree.packages, self.root / "src", self.root]
        # Folders of the checkout in the caller's PYTHONPATH contain the code under test: replace them.
        callers = (Path(entry) for entry in environ.get("PYTHONPATH", "").split(":") if entry)
        folders += [self.worktree.counterpart(entry) if entry.is_absolute() else entry for entry in callers]
        return {**environ, "PYTHONPATH": ":".join(str(folder) for folder in folders)}

    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Return the commit's version of a workload of the repository; any other workload is unchanged."""
        folder = self.worktree.counterpart(spec.folder)
        if folder == spec.folder:
            return spec
        if not folder.is_dir():
            raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: there is no {folder}")
        if spec.module is not None:
            self._redirect(spec.module.partition(".")[0])
        return read_workload(spec.name, folder, spec.module)

    def script(self, script: str) -> str:
        """Return the commit's version of a file of the repository; modules are found on the search path."""
        path = self.worktree.counterpart(Path(script)) if script.endswith(".py") else Path(script)
        if path != Path(script) and not path.is_file():
            raise SpecError(f"script {script!r} does not exist at {self.name}: there is no {path}")
        return str(path)

    def _redirect(self, package: str) -> None:
        # If a package's name differs from its folder's, no folder on the search path leads to the package.
        folder, link = package_folder(package), self.worktree.packages / package
        if folder is not None:
            # Another search with this worktree, or a setup command, may have put the package there.
            with suppress(FileExistsError):
                link.symlink_to(self.worktree.counterpart(folder), target_is_directory=True)


class EnvironmentReference(Reference, frozen=True, tag="environment"):
    """Another environment.

    Attributes:
        installed: Name of each workload installed there -> folder and module.
    """

    installed: dict[str, tuple[Path, str]]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Put the caller's search path and the root folder after the packages that are installed there."""
        late = ":".join(filter(None, [environ.get("PYTHONPATH"), str(self.root)]))
        return {**_without_path(environ), variables.LATE_PATH: late}

    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Return the version installed there; a workload in a folder of the user is unchanged."""
        if spec.module is None:
            return spec
        if spec.name not in self.installed:
            there = sorted(self.installed)
            raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: it has {there} installed")
        return read_workload(spec.name, *self.installed[spec.name])

    def script(self, script: str) -> str:
        """Return the same script."""
        return script


AnyReference: TypeAlias = CommitReference | EnvironmentReference


def check_reference(name: str, rootdir: Path) -> None:
    """Check before any launch that the commit or the interpreter that ``--aorta-ab`` names exists.

    Raises:
        SpecError: It does not exist.
    """
    try:
        if not name.startswith(PYTHON_PREFIX):
            commit_of(rootdir, name)
        elif shutil.which(python := _interpreter(name, rootdir)) is None:
            raise SpecError(f"there is no program {python}")
    except SpecError as error:
        raise SpecError(f"--aorta-ab={name}: {error}") from None


class References:
    """The A/B references of a session, each opened at its first use.

    Args:
        name: The reference that ``--aorta-ab`` names; None if there is none.
        rootdir: pytest's root folder.
        setup: The commands that prepare worktrees.
    """

    def __init__(self, name: str | None, rootdir: Path, setup: Setup = NO_SETUP) -> None:
        self._name = name
        self._rootdir = rootdir
        self._setup = setup
        self._commits: dict[str, CommitReference] = {}
        self._environment: EnvironmentReference | None = None

    def open(self) -> AnyReference:
        """Return the A/B reference that ``--aorta-ab`` names.

        Raises:
            SpecError: The option is not given, or its reference can't be used.
        """
        if self._name is None:
            raise SpecError("no A/B reference to launch; name one with --aorta-ab=REF")
        try:
            if not self._name.startswith(PYTHON_PREFIX):
                return self.commit(commit_of(self._rootdir, self._name), self._name)
            if self._environment is None:
                python = _interpreter(self._name, self._rootdir)
                self._environment = EnvironmentReference(self._name, python, self._rootdir, _probe(python))
            return self._environment
        except SpecError as error:
            raise SpecError(f"--aorta-ab={self._name}: {error}") from None

    def commit(self, commit: str, name: str) -> CommitReference:
        """Return the A/B reference of a commit, given by its full hash, which messages call ``name``.

        Raises:
            SpecError: The commit can't be checked out, a setup command fails, or pytest's root folder does not exist
                there.
        """
        if commit not in self._commits:
            worktree = open_worktree(self._rootdir, commit, self._setup)
            root = worktree.tree / self._rootdir.resolve().relative_to(worktree.checkout)
            if not root.is_dir():
                raise SpecError(f"pytest's root folder does not exist there: {root.relative_to(worktree.tree)}")
            # Ranks run this very package, even if the repository contains a version of it. Ranks of another session
            # with this worktree may be following the link.
            write_link(worktree.packages / PACKAGE_ROOT.name, PACKAGE_ROOT)
            self._commits[commit] = CommitReference(name, sys.executable, root, worktree)
        return self._commits[commit]


def _interpreter(name: str, rootdir: Path) -> str:
    # Don't resolve the path: a virtual environment's interpreter is a link to the interpreter that created it.
    return str(rootdir / Path(name.removeprefix(PYTHON_PREFIX)).expanduser())


def _probe(python: str) -> dict[str, tuple[Path, str]]:
    """Return the workloads that are installed in the environment of another interpreter."""
    status, output, complaint = run_program([python, "-P", "-c", _PROBE], _without_path(os.environ), PROBE_S)
    if status:
        problem = " ".join(complaint.strip().splitlines()[-1:])
        raise SpecError(f"{python} is not an interpreter with this version of pytest-aorta: {problem}")
    found = json.loads(output)
    if missing := found["missing"]:
        raise SpecError(f"{python} can't import {' and '.join(missing)}; install what is missing there")
    return {name: (Path(folder), module) for name, (folder, module) in found["workloads"].items()}


def _without_path(environ: Mapping[str, str]) -> dict[str, str]:
    # Both variables lead to packages of the environment that pytest runs in.
    return {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
