"""A/B references: the other version of the code, whose launches are compared with those of the code under test.

An A/B reference is a commit, whose launches run the present rank code on the workloads, scripts and packages of a
worktree; or the interpreter of another environment, whose launches run the code installed there.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, is_source_of, locked, raised_as, write_link, write_text
from pytest_aorta.common.model import Model
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import did_you_mean
from pytest_aorta.plan.options import PYTHON_PREFIX
from pytest_aorta.plan.workloads import WorkloadSpec, package_folder, read_workload

GIT_S = 60.0
# Git filters may download large files during a checkout.
CHECKOUT_S = 600.0
# A compiled dependency can take an hour to build.
SETUP_S = 7200.0
UNUSED_S = 14 * 86400.0
# The folder of worktrees in the user's cache; each has a folder of its own.
ENVIRONMENTS = "environments"
# Entries of a worktree's folder besides the files of the commit: links to packages, the output of the setup commands,
# and a file that exists once the commit is checked out and prepared, and that each use touches.
PACKAGES, LOG_FILE, READY_FILE = "packages", "setup.log", "ready"
# The names of worktrees of this package, by which git's folder of worktrees has an entry for each.
_NAMES = f"{'[0-9a-f]' * 16}-{'[0-9a-f]' * 8}"
# Held in the repository's git folder during each git command that lists or changes worktrees.
LOCK_FILE = "aorta-worktrees.lock"
# Git sets these variables for its hooks; with them, git would use a repository other than the folder's.
_SCRUBBED = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
# A checkout runs no hooks or monitors of the user, and starts no background maintenance.
_QUIET = ["core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"]
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


@dataclass(frozen=True)
class Worktree:
    """The files of a commit.

    Attributes:
        checkout: Root of the working tree under test.
        commit: Full hash of the commit.
        tree: Folder with the files of the commit.
        packages: Empty folder beside ``tree``.
    """

    checkout: Path
    commit: str
    tree: Path
    packages: Path

    def counterpart(self, path: Path) -> Path:
        """Return the commit's version of ``path``, or ``path`` itself if it is not a source file of the repository."""
        if not is_source_of(self.checkout, path):
            return path
        return self.tree / path.resolve().relative_to(self.checkout)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this package in the user's cache."""
    given = environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "pytest-aorta"


def open_worktree(
    rootdir: Path, commit: str, say: Callable[[str], None], setup: Sequence[Sequence[str]] = ()
) -> Worktree:
    """Return the worktree of a commit, given by its full hash; check it out and prepare it unless an earlier call has.

    A worktree that can't be used again, such as one whose checkout was killed, is made again. Worktrees that no session
    has used for ``UNUSED_S`` are deleted.

    Args:
        rootdir: pytest's root folder.
        commit: Full hash of the commit.
        say: Shows a line to the user if the worktree is made again.
        setup: Words of each command that prepares the worktree; ``{tree}``, ``{packages}`` and ``{commit}`` are
            replaced. ``packages`` is a folder of the commit that comes first on the search path of its launches.

    Raises:
        SpecError: The commit can't be checked out, a setup command fails, or the folder of the worktrees can't be
            written or lies in the repository, whose tests would be collected there.
    """
    checkout = Path(git(rootdir, "rev-parse", "--show-toplevel")).resolve()
    kept = (cache_folder() / ENVIRONMENTS).resolve()
    if kept.is_relative_to(checkout):
        raise SpecError(f"{kept} is inside of the repository {checkout}; set XDG_CACHE_HOME to a folder outside of it")
    digest = sha256(json.dumps([str(checkout), setup]).encode()).hexdigest()[:8]
    own = kept / f"{commit[:16]}-{digest}"
    worktree = Worktree(checkout, commit, own / own.name, own / PACKAGES)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        _remove_unused(kept)
        with locked(own.with_suffix(".lock"), limit_s=SETUP_S):
            problem = _problem(worktree, has_setup=bool(setup))
            if problem:
                if own.exists():
                    say(f"{own} is checked out again: {problem}")
                _check_out(worktree)
                _run_commands(worktree, setup, worktree.tree / rootdir.resolve().relative_to(checkout))
            write_text(own / READY_FILE, "")
    except OSError as error:
        raise SpecError(f"{error.filename or own}: {error.strerror or error}") from None
    return worktree


def _problem(worktree: Worktree, *, has_setup: bool) -> str:
    """Return why a worktree of an earlier session can't be used; empty if it has the files of the commit.

    Files that launches have changed are restored. Files that setup commands have changed can't be told from those.
    """
    if not (worktree.tree.parent / READY_FILE).is_file():
        return "it was not finished"
    try:
        # Outside of a worktree, git looks for a repository in the folders above, whose files are not ours.
        found = git(worktree.tree, "rev-parse", "--show-toplevel", "HEAD", "--git-common-dir").split("\n")
        if found != [str(worktree.tree), worktree.commit, str(_git_folder(worktree.checkout))]:
            return f"git has another commit or repository there: {' '.join(found)}"
        if not has_setup:
            _reset(worktree)
    except SpecError as error:
        return str(error)
    return ""


def _check_out(worktree: Worktree) -> None:
    """Check out a commit in a new worktree, in place of what an earlier session has left.

    Raises:
        SpecError: Git fails.
        OSError: What was left can't be deleted, or the folder can't be written.
    """
    _delete(worktree.tree.parent)
    worktree.packages.mkdir(parents=True)
    common = _git_folder(worktree.checkout)
    # Git reads the entry of every worktree, and fails on an entry that another git is creating or removing.
    with locked(common / LOCK_FILE, limit_s=CHECKOUT_S):
        for entry in (common / "worktrees").glob(_NAMES):
            # Git locks an entry that it creates. While this lock is held no git does, so that git was killed.
            if entry.name == worktree.tree.name or (entry / "locked").exists():
                shutil.rmtree(entry)
        git(worktree.checkout, "worktree", "prune")
        git(worktree.checkout, "worktree", "add", "--no-checkout", "--detach", str(worktree.tree), worktree.commit)
    # The files can take minutes and do not need the lock of other sessions.
    _reset(worktree)


def _git_folder(checkout: Path) -> Path:
    """Return the git folder that all worktrees of a repository share."""
    return (checkout / git(checkout, "rev-parse", "--git-common-dir")).resolve()


def _reset(worktree: Worktree) -> None:
    git(worktree.tree, "reset", "--hard", "--no-recurse-submodules", limit_s=CHECKOUT_S)


def _delete(folder: Path) -> None:
    """Delete a folder if it exists, also one with folders that a setup command has made read-only."""
    for base, names, _ in os.walk(folder):
        for path in (Path(base, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def setup_program(command: Sequence[str]) -> str | None:
    """Return the path of a setup command's program, or None if this machine does not have the program.

    A path with a slash is relative to the root folder of each commit, so only the commit can show whether it exists.
    """
    program = command[0]
    return program if "/" in program else shutil.which(program, path=_environment()["PATH"])


def commit_of(folder: Path, ref: str) -> str:
    """Return the full hash of the commit that ``ref`` names in the repository that contains ``folder``.

    Raises:
        SpecError: Git, the repository or the commit does not exist; the message says how to fetch a commit.
    """
    try:
        return git(folder, "rev-parse", "--verify", f"{ref}^{{commit}}")
    except SpecError:
        # Outside a repository this command fails too, and its message says so.
        shallow = ", which is shallow" * (git(folder, "rev-parse", "--is-shallow-repository") == "true")
        names = git(folder, "for-each-ref", "--format=%(refname:short)").split("\n")
        raise SpecError(
            f"{ref!r} is not a commit of this clone{shallow}{did_you_mean([ref], names)}; if it exists elsewhere, "
            f"fetch it first: git fetch, or fetch-depth: 0 in the checkout of CI"
        ) from None


def first_parents(folder: Path, good: str, bad: str) -> list[str]:
    """Return the hashes of the commits after ``good`` up to ``bad`` on the line of first parents, oldest first.

    Each of these commits was the state of the branch at some time. Commits of merged branches are left out: they were
    based on older states, so they may lack a change that an earlier commit of the line introduced.

    Raises:
        SpecError: ``good`` is not before ``bad`` on that line.
    """
    line = git(folder, "rev-list", "--first-parent", "--reverse", f"{good}..{bad}").split()
    if not line or git(folder, "rev-list", "--parents", "-n1", line[0]).split()[1:2] != [good]:
        raise SpecError(f"{good[:12]} is not before {bad[:12]} in git log --first-parent {bad[:12]}")
    return line


def git(folder: Path, *arguments: str, limit_s: float = GIT_S) -> str:
    """Return the output of a git command in ``folder``.

    Raises:
        SpecError: Git is not installed, or the command fails or takes longer than ``limit_s`` seconds.
    """
    program = shutil.which("git")
    if program is None:
        raise SpecError("git is not installed, or not on the path")
    environ = {name: value for name, value in os.environ.items() if name not in _SCRUBBED}
    settings = [part for setting in _QUIET for part in ("-c", setting)]
    argv = [program, "-C", str(folder), *settings, *arguments]
    status, output, complaint = run_program(argv, environ | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}, limit_s)
    if status:
        words = " ".join(complaint.split()) or f"exit code {status}"
        raise SpecError(f"git {' '.join(arguments[:2])} in {folder}: {words[-600:]}")
    return output.removesuffix("\n")


def _remove_unused(kept: Path) -> None:
    """Delete worktrees that no session has used for ``UNUSED_S``; git forgets them when it next prunes."""
    oldest_s = time.time() - UNUSED_S
    for ready in kept.glob(f"*/{READY_FILE}"):
        with suppress(OSError):  # another session deletes it at the same time
            if ready.stat().st_mtime < oldest_s:
                _delete(ready.parent)


def _run_commands(worktree: Worktree, setup: Sequence[Sequence[str]], root: Path) -> None:
    log_file = worktree.tree.parent / LOG_FILE
    names = {"{tree}": str(worktree.tree), "{packages}": str(worktree.packages), "{commit}": worktree.commit}
    for command in setup:
        argv = [re.sub(r"\{(tree|packages|commit)\}", lambda match: names[match[0]], word) for word in command]
        status, output, complaint = run_program(argv, _environment(), SETUP_S, cwd=root)
        with log_file.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(argv)}\n{output}{complaint}")
        if status:
            last = " ".join((complaint.strip() or output.strip()).splitlines()[-1:])
            raise SpecError(f"--setup: {command[0]} ended with exit code {status}: {last} ({log_file})")


def _environment() -> dict[str, str]:
    """Return the environment, in which ``python`` and ``pip`` are those of this interpreter."""
    own = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


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
            self._redirect(spec.module.partition(":")[0].partition(".")[0])
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
    with raised_as(SpecError, f"--aorta-ab={name}: ", SpecError):
        if not name.startswith(PYTHON_PREFIX):
            commit_of(rootdir, name)
        elif shutil.which(python := _interpreter(name, rootdir)) is None:
            raise SpecError(f"there is no program {python}")


@dataclass(frozen=True)
class References:
    """The A/B references of a session, each opened at its first use.

    Attributes:
        name: The reference that ``--aorta-ab`` names; None if there is none.
        rootdir: pytest's root folder.
        say: As in :func:`open_worktree`.
        setup: As in :func:`open_worktree`.
    """

    name: str | None
    rootdir: Path
    say: Callable[[str], None]
    setup: Sequence[Sequence[str]] = ()
    _commits: dict[str, CommitReference] = field(default_factory=dict)

    @cached_property
    def _environment(self) -> EnvironmentReference:
        python = _interpreter(str(self.name), self.rootdir)
        return EnvironmentReference(str(self.name), python, self.rootdir, _probe(python))

    def open(self) -> AnyReference:
        """Return the A/B reference that ``--aorta-ab`` names.

        Raises:
            SpecError: The option is not given, or its reference can't be used.
        """
        if self.name is None:
            raise SpecError("no A/B reference to launch; name one with --aorta-ab=REF")
        with raised_as(SpecError, f"--aorta-ab={self.name}: ", SpecError):
            if not self.name.startswith(PYTHON_PREFIX):
                return self.commit(commit_of(self.rootdir, self.name), self.name)
            return self._environment

    def commit(self, commit: str, name: str) -> CommitReference:
        """Return the A/B reference of a commit, given by its full hash, which messages call ``name``.

        Raises:
            SpecError: The commit can't be checked out, a setup command fails, or pytest's root folder does not exist
                there.
        """
        if commit not in self._commits:
            worktree = open_worktree(self.rootdir, commit, self.say, self.setup)
            root = worktree.tree / self.rootdir.resolve().relative_to(worktree.checkout)
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
