"""A/B references: the other version of the code, whose launches are compared with those of the code under test.

The launches of a commit run the present rank code on the workloads, scripts and packages of a worktree; those of
another environment run what is installed there.
"""

import json
import os
import re
import shutil
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, is_source_of, locked, raised_as, write_link
from pytest_aorta.common.model import Model
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import did_you_mean
from pytest_aorta.plan.cache import (
    ENVIRONMENTS,
    PACKAGES,
    SETUP_S,
    cache_folder,
    command_environment,
    name_of,
    prepared,
    run_logged,
)
from pytest_aorta.plan.environments import Environment, Recipe, changes_text, probe, version_changes, without_path
from pytest_aorta.plan.side import SideSpec, parse_side
from pytest_aorta.plan.workloads import WorkloadSpec, check_environment, package_folder, read_workload

GIT_S = 60.0
# Git filters may download large files during a checkout.
CHECKOUT_S = 600.0
# The names of worktrees of this package, by which git's folder of worktrees has an entry for each.
_NAMES = f"{'[0-9a-f]' * 16}-{'[0-9a-f]' * 8}"
# Held in the repository's git folder during each git command that lists or changes worktrees.
LOCK_FILE = "aorta-worktrees.lock"
# Git sets these variables for its hooks; with them, git would use a repository other than the folder's.
_SCRUBBED = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
# A checkout runs no hooks or monitors of the user, and starts no background maintenance.
_QUIET = ["core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"]


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


def open_worktree(rootdir: Path, commit: str, say: Callable[[str], None], setup: Sequence[Sequence[str]]) -> Worktree:
    """Return the worktree of a commit, given by its full hash; check it out and prepare it unless an earlier call has.

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

    def make(own: Path) -> None:
        _check_out(worktree)
        _run_commands(worktree, setup, own, worktree.tree / rootdir.resolve().relative_to(checkout))

    prepared(own.name, make, say, lambda: _problem(worktree, has_setup=bool(setup)))
    return worktree


def _problem(worktree: Worktree, *, has_setup: bool) -> str:
    """Return why a worktree of an earlier session can't be used; empty if it has the files of the commit.

    Files that launches have changed are restored. Files that setup commands have changed can't be told from those.
    """
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
    """Check out a commit in a new worktree.

    Raises:
        SpecError: Git fails.
        OSError: The folder can't be written.
    """
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


def setup_program(command: Sequence[str]) -> str | None:
    """Return the path of a setup command's program, or None if this machine does not have the program.

    A path with a slash is relative to the root folder of each commit, so only the commit can show whether it exists.
    """
    program = command[0]
    return program if "/" in program else shutil.which(program, path=command_environment()["PATH"])


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


def clone_of(url: str, say: Callable[[str], None]) -> Path:
    """Return the folder of a bare clone of a repository, which has all that the repository has now.

    Raises:
        SpecError: It can't be cloned.
    """

    def clone(own: Path) -> None:
        say(f"{own}: {url} is cloned")
        git(own.parent, "clone", "--bare", "--quiet", "--", url, str(own), limit_s=SETUP_S)

    own = prepared(name_of("clone", url), clone, say)
    git(own, "fetch", "--quiet", "--tags", "--force", "origin", "+refs/heads/*:refs/heads/*", limit_s=SETUP_S)
    return own


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


def _run_commands(worktree: Worktree, setup: Sequence[Sequence[str]], own: Path, root: Path) -> None:
    names = {"{tree}": str(worktree.tree), "{packages}": str(worktree.packages), "{commit}": worktree.commit}
    for command in setup:
        argv = [re.sub(r"\{(tree|packages|commit)\}", lambda match: names[match[0]], word) for word in command]
        run_logged("--setup", argv, own, root)


class Reference(Model, frozen=True, omit_defaults=True):
    """The properties of a launch that differ for an A/B reference.

    Attributes:
        name: Text given to ``--aorta-ab``, or the name of a search's point.
        python: Interpreter of the torchrun agent and the ranks.
        root: Folder in which the agent and the ranks run, the counterpart of pytest's root folder.
        worktree: The files of a commit; None: those of the working tree.
        prefix: ``sys.prefix`` of another environment; None: the environment of pytest.
        harness: Folder with a link to this package, for another environment.
        installed: Name of each workload of another environment -> folder and module.
        variables: Environment variables of the ranks.
        early, late: Folders of packages, as of an :class:`Environment`.
        differs: How the environment and the variables differ from those of the code under test; empty if they do not.
    """

    name: str
    python: str
    root: Path
    worktree: Worktree | None = None
    prefix: Path | None = None
    harness: Path | None = None
    installed: Mapping[str, tuple[Path, str]] = {}
    variables: Mapping[str, str] = {}
    early: tuple[Path, ...] = ()
    late: tuple[Path, ...] = ()
    differs: str = ""

    def __str__(self) -> str:
        """Return the name, with how the environment and the variables differ."""
        return f"{self.name}: {self.differs}" if self.differs else self.name

    @property
    def commit(self) -> str | None:
        """The full hash of the commit whose code is launched; None if it is the working tree's."""
        return self.worktree.commit if self.worktree else None

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` with this side's search path.

        This package comes first, then the commit's ``src/`` and root folder, before any install of the checkout. The
        caller's search path comes next, but in another environment last.
        """
        callers = [Path(entry) for entry in environ.get("PYTHONPATH", "").split(":") if entry]
        early, late = [*([self.harness] if self.harness else []), *self.early], [self.root]
        if self.worktree:
            early, late = [self.worktree.packages, self.root / "src", self.root], []
            # Folders of the checkout in the caller's PYTHONPATH contain the code under test: replace them.
            callers = [self.worktree.counterpart(entry) if entry.is_absolute() else entry for entry in callers]
        if self.prefix is None:
            return {**environ, "PYTHONPATH": ":".join(map(str, [*early, *callers]))}
        paths = {"PYTHONPATH": early, variables.FIRST_PATH: self.late, variables.LATE_PATH: [*callers, *late]}
        return without_path(environ) | {name: ":".join(map(str, folders)) for name, folders in paths.items()}

    def workload(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Return this side's version of a workload.

        That is the commit's if it is the repository's, else what another environment has installed; a workload in
        another folder is unchanged.
        """
        folder = self.worktree.counterpart(spec.folder) if self.worktree else spec.folder
        if self.worktree and folder != spec.folder:
            if not folder.is_dir():
                raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: there is no {folder}")
            if spec.module is not None:
                _redirect(self.worktree, spec.module.partition(":")[0].partition(".")[0])
            return read_workload(spec.name, folder, spec.module)
        if self.prefix is None or spec.module is None:
            return spec
        if spec.name not in self.installed:
            there = sorted(self.installed)
            raise SpecError(f"workload {spec.name!r} does not exist at {self.name}: it has {there} installed")
        return read_workload(spec.name, *self.installed[spec.name])

    def script(self, script: str) -> str:
        """Return the commit's version of a file of the repository; modules are found on the search path."""
        if self.worktree is None or not script.endswith(".py"):
            return script
        path = self.worktree.counterpart(Path(script))
        if path != Path(script) and not path.is_file():
            raise SpecError(f"script {script!r} does not exist at {self.name}: there is no {path}")
        return str(path)


def _redirect(worktree: Worktree, package: str) -> None:
    # If a package's name differs from its folder's, no folder on the search path leads to the package.
    folder, link = package_folder(package), worktree.packages / package
    if folder is not None:
        # Another search with this worktree, or a setup command, may have put the package there.
        with suppress(FileExistsError):
            link.symlink_to(worktree.counterpart(folder), target_is_directory=True)


def check_reference(text: str, rootdir: Path) -> None:
    """Check before any launch that the commit, the interpreter and the file that ``--aorta-ab`` names exist.

    Raises:
        SpecError: One of them does not exist, or a variable is not allowed.
    """
    with raised_as(SpecError, f"--aorta-ab={text}: ", SpecError):
        check_side(parse_side(text), rootdir)


def check_side(side: SideSpec, rootdir: Path) -> None:
    """Check before any launch that what a side names exists; the lock file of a commit is looked for later.

    Raises:
        SpecError: It does not exist, or a variable is not allowed.
    """
    if side.commit:
        commit_of(rootdir, side.commit)
    if side.python and shutil.which(python := _interpreter(side, rootdir)) is None:
        raise SpecError(f"there is no program {python}")
    if side.lock and not side.commit and not (file := rootdir / side.lock).is_file():
        raise SpecError(f"there is no file {file}")
    check_environment("env", side.variables)


def _interpreter(side: SideSpec, rootdir: Path) -> str:
    # Don't resolve the path: a virtual environment's interpreter is a link to the interpreter that created it.
    return str(rootdir / Path(side.python).expanduser()) if side.python else sys.executable


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
    _opened: dict[str, Reference] = field(default_factory=dict)

    @cached_property
    def own(self) -> Environment:
        """The environment of the code under test."""
        return probe(sys.executable, self.rootdir, self.say)

    def open(self, text: str | None = None) -> Reference:
        """Return the A/B reference that a text spells, or else ``--aorta-ab``.

        Raises:
            SpecError: Neither is given, the text is not allowed, or the reference can't be used.
        """
        given, name = ("--aorta-ab", self.name) if text is None else ("reference", text)
        if name is None:
            raise SpecError("no A/B reference to launch; name one with --aorta-ab=SIDE")
        with raised_as(SpecError, f"{given}={name}: ", (SpecError, ArgumentTypeError)):
            return self.side(parse_side(name))

    def side(self, side: SideSpec) -> Reference:
        """Return the A/B reference that a side describes.

        Raises:
            SpecError: The commit can't be checked out, a setup command fails, pytest's root folder does not exist
                there, or the environment can't be built.
        """
        if side.text not in self._opened:
            check_side(side, self.rootdir)
            worktree = self.worktree(side)
            environment = self.environment(side, worktree) if side.has_environment else None
            self._opened[side.text] = self.reference(side, worktree, environment)
        return self._opened[side.text]

    def reference(self, side: SideSpec, worktree: Worktree | None, environment: Environment | None) -> Reference:
        """Return the A/B reference of a worktree and an environment, with a side's name and variables."""
        root = self._root(worktree) if worktree else self.rootdir
        unset = {name: f"{value} -> {os.environ.get(name, 'unset')}" for name, value in side.variables.items()}
        found = Reference(side.text, sys.executable, root, worktree, variables=side.variables)
        if environment is None:
            return found.replace(differs=changes_text(unset))
        return found.replace(
            python=environment.python,
            prefix=environment.prefix,
            harness=environment.harness,
            installed=environment.workloads,
            early=environment.early,
            late=environment.late,
            differs=changes_text(unset | version_changes(environment, self.own)),
        )

    def environment(self, side: SideSpec, worktree: Worktree | None = None) -> Environment:
        """Return the environment of a side, which is built if it is none of an interpreter.

        Raises:
            SpecError: The interpreter or the file does not exist, or the environment can't be built.
        """
        base = probe(_interpreter(side, self.rootdir), self.rootdir, self.say) if side.python else self.own
        if not side.lock and not side.requirements:
            return base
        lock = None
        if side.lock:
            lock = self.rootdir / side.lock
            lock = worktree.counterpart(lock) if worktree else lock
            if not lock.is_file():
                raise SpecError(f"there is no file {lock}")
        return Recipe(base, lock, side.requirements).build(self.rootdir, self.say)

    def _root(self, worktree: Worktree) -> Path:
        return worktree.tree / self.rootdir.resolve().relative_to(worktree.checkout)

    def worktree(self, side: SideSpec) -> Worktree | None:
        """Return the worktree of a side's commit; None if it names none.

        Raises:
            SpecError: As in :meth:`side`.
        """
        if not side.commit:
            return None
        worktree = open_worktree(self.rootdir, commit_of(self.rootdir, side.commit), self.say, self.setup)
        if not (root := self._root(worktree)).is_dir():
            raise SpecError(f"pytest's root folder does not exist there: {root.relative_to(worktree.tree)}")
        # Ranks run this very package, even if the repository contains a version of it. Ranks of another session
        # with this worktree may be following the link.
        write_link(worktree.packages / PACKAGE_ROOT.name, PACKAGE_ROOT)
        return worktree
