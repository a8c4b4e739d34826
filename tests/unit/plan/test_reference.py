"""Tests of A/B references: worktrees of commits, and other environments."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import PACKAGE_ROOT, is_source_of
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.launch.guarded import agent_command, launch_environment
from pytest_aorta.plan import cache
from pytest_aorta.plan import reference as worktree
from pytest_aorta.plan.launch_plan import LaunchPlan, LaunchRequest, at_reference
from pytest_aorta.plan.reference import (
    Reference,
    References,
    check_reference,
    commit_of,
    open_worktree,
)
from pytest_aorta.plan.workloads import find_workload, read_workload, resolve_config
from tests.unit.builders import each_of, git, make_plan, write
from tests.unit.wheels import make_wheel

YAML = """
description: a toy
class: Toy
config:
  steps: {{type: integer, minimum: 1, default: 4, description: measured steps}}
  {key}: {{type: string, enum: {values}, default: {default}, description: changes}}
"""

Opener = Callable[..., References]


def toy_yaml(key: str = "mode", values: str = "[fast, slow]", default: str = "fast") -> str:
    return YAML.format(key=key, values=values, default=default)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the project in a sub-folder; the commit's files say old, the working tree's say new."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top = tmp_path / "top"
    write(top / "project/workloads/toy/default.yaml", toy_yaml())
    write(top / "project/train.py", "old")
    write(top / "project/src/package/__init__.py")
    git(top, "init", "-q")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "old")
    git(top, "tag", "v1")
    write(top / "project/train.py", "new")
    return top


@pytest.fixture
def project(repository: Path) -> Path:
    return repository / "project"


@pytest.fixture
def opener(project: Path) -> Opener:
    """Makes the references of one session each."""

    def make(name: str | None, rootdir: Path = project, *commands: tuple[str, ...]) -> References:
        return References(name, rootdir, print, commands)

    return make


def worktrees(folder: Path) -> list[str]:
    """Return all worktrees but the repository's own."""
    lines = git(folder, "worktree", "list", "--porcelain").splitlines()
    return [line.removeprefix("worktree ") for line in lines if line.startswith("worktree ")][1:]


def commit_reference(references: References) -> Reference:
    reference = references.open()
    assert reference.worktree is not None
    return reference


def test_sessions_of_one_repository_never_run_git_worktree_at_the_same_time(project, monkeypatch):
    """Git fails on the entry of a worktree that another git is creating or removing."""
    alone, run = threading.Lock(), worktree.git

    def checked(folder: Path, *arguments: str, **limits: float) -> str:
        if arguments[0] != "worktree":
            return run(folder, *arguments, **limits)
        assert alone.acquire(blocking=False), f"git {arguments} runs while another git worktree does"
        try:
            return run(folder, *arguments, **limits)
        finally:
            alone.release()

    def session(number: int) -> str:
        opened = open_worktree(project, commit_of(project, "HEAD"), print, [("true", str(number % 4))])
        return (opened.tree / "project/train.py").read_text()

    monkeypatch.setattr(worktree, "git", checked)
    with ThreadPoolExecutor(4) as sessions:
        assert list(sessions.map(session, range(8))) == ["old"] * 8


@pytest.mark.parametrize("ref", ["HEAD", "main", "v1", "main@{0}"])
def test_commit_is_checked_out_in_the_users_cache(opener, project, tmp_path, ref):
    references = opener(ref)
    assert worktrees(project) == []
    root = references.open().root
    assert references.open().root is root
    assert [(folder / "train.py").read_text() for folder in (root, project)] == ["old", "new"]
    assert worktrees(project) == [str(root.parent)]
    assert root.is_relative_to(tmp_path / "cache/pytest-aorta/environments")


def test_next_session_uses_the_worktree_without_what_launches_wrote(opener):
    root = opener("HEAD").open().root
    (root / "train.py").write_text("written by a launch")
    (root / "__pycache__").mkdir()
    assert opener("v1").open().root == root
    assert not git(root, "status", "--porcelain", "train.py")
    assert (root / "__pycache__").is_dir()


def test_setup_commands_run_once_and_their_changes_to_files_stay(opener, tmp_path):
    command = ("sh", "-c", f"echo ran >> {tmp_path}/ran; echo built > train.py; touch {{packages}}/built")
    for _ in range(2):
        reference = opener("HEAD", tmp_path / "top/project", command).open()
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert (reference.root / "train.py").read_text() == "built\n"
    assert (reference.worktree.packages / "built").is_file()
    assert opener("HEAD").open().root != reference.root


def entry_of(reference: Reference) -> Path:
    return reference.worktree.checkout / ".git/worktrees" / reference.worktree.tree.name


def killed_while_added(reference: Reference, lost: str = "", empty: str = "") -> None:
    """Leave what `git worktree add` leaves if it is killed, whose entry is locked and may lack files."""
    entry = entry_of(reference)
    (entry / "locked").write_text("initializing")
    for name in lost.split():
        (entry / name).unlink()
    if empty:
        (entry / empty).write_text("")
    (reference.worktree.tree.parent / "ready").unlink()


def cloned_anew(reference: Reference) -> None:
    checkout = reference.worktree.checkout
    copy = checkout.with_name("copy")
    git(checkout.parent, "clone", "-q", str(checkout), str(copy))
    shutil.rmtree(checkout)
    copy.rename(checkout)


def another_repository(reference: Reference) -> None:
    shutil.rmtree(reference.worktree.tree)
    git(reference.worktree.tree.parent, "clone", "-q", str(reference.worktree.checkout), str(reference.worktree.tree))


def another_commit(reference: Reference) -> None:
    git(reference.worktree.tree, "commit", "--allow-empty", "--message=of a launch")


def pruned(reference: Reference) -> None:
    shutil.rmtree(entry_of(reference))


def inside_of_a_repository(reference: Reference) -> None:
    """Let the folders above be the user's own repository, with a change that is not committed."""
    (reference.worktree.tree / ".git").unlink()
    home = next(path for path in reference.worktree.tree.parents if path.name == "cache")
    git(home, "init", "-q")
    git(home, "commit", "--allow-empty", "--message=home")
    git(home, "add", str(write(home / "notes")))


def emptied(reference: Reference) -> None:
    shutil.rmtree(reference.worktree.tree)
    reference.worktree.tree.mkdir()


LEFT: dict[str, Callable[[Reference], None]] = {
    "git worktree add was killed": killed_while_added,
    "it was killed before the entry was whole": lambda left: killed_while_added(left, "gitdir commondir HEAD"),
    "it was killed while it wrote the entry": lambda left: killed_while_added(left, empty="commondir"),
    "checkout was killed": lambda left: (left.worktree.tree.parent / "ready").unlink(),
    "no .git": lambda left: (left.worktree.tree / ".git").unlink(),
    "no .git, in a repository": inside_of_a_repository,
    ".git is cut off": lambda left: (left.worktree.tree / ".git").write_text("gitdir: "),
    "repository cloned anew": cloned_anew,
    "index.lock": lambda left: (entry_of(left) / "index.lock").touch(),
    "pruned": pruned,
    "HEAD is cut off": lambda left: (entry_of(left) / "HEAD").write_text(""),
    "another commit": another_commit,
    "another repository": another_repository,
    "no folder": lambda left: shutil.rmtree(left.worktree.tree),
    "empty folder": emptied,
}


@each_of("leave", LEFT)
def test_worktree_that_git_does_not_confirm_is_made_again_and_says_so(project, leave):
    said: list[str] = []
    left = commit_reference(References("HEAD", project, said.append))
    own = left.worktree.tree.parent
    (own / "left").touch()
    leave(left)
    home = own.parents[2]
    for _ in range(2):
        reference = commit_reference(References("HEAD", project, said.append))
        assert not git(reference.root, "status", "--porcelain")
    assert [line.partition(": ")[0] for line in said] == [f"{own} is made again"]
    assert not (own / "left").exists()
    assert worktrees(project) == [str(reference.worktree.tree)]
    assert not (home / "notes").exists() or git(home, "status", "--porcelain", "notes") == "A  notes"


def test_index_that_was_written_by_half_is_written_again(opener):
    os.truncate(entry_of(commit_reference(opener("HEAD"))) / "index", 40)
    assert not git(opener("HEAD").open().root, "status", "--porcelain")


def test_worktree_of_another_commit_that_was_killed_does_not_stop_git(opener, project):
    killed_while_added(commit_reference(opener("HEAD")), empty="commondir")
    git(project, "commit", "--allow-empty", "--message=newer")
    assert opener("HEAD").open().root.is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_worktree_with_read_only_folders_is_made_again(opener, project):
    setup = ("sh", "-c", "mkdir -p built/cache; touch built/cache/file; chmod -R a-w built")
    own = opener("HEAD", project, setup).open().root.parents[1]
    (own / "ready").unlink()
    assert (opener("HEAD", project, setup).open().root / "built").is_dir()


def test_failed_setup_is_run_again_by_the_next_session(opener, project):
    for _ in range(2):
        with pytest.raises(SpecError, match=r"--setup: sh ended with exit code 3: why .*setup\.log"):
            opener("HEAD", project, ("sh", "-c", "echo why >&2; exit 3")).open()


def test_worktree_that_no_session_has_used_for_two_weeks_is_deleted(opener, project):
    unused, used = (opener("HEAD", project, *setup).open().root.parents[1] for setup in ((), (("true",),)))
    for own, days in ((unused, 15), (used, 13)):
        os.utime(own / "ready", (time.time() - days * 86400,) * 2)
    opener("HEAD", project, ("true",), ("true",)).open()
    assert (unused.exists(), used.exists()) == (False, True)
    assert len(worktrees(project)) == 2


def test_worktree_of_the_users_own_is_left_alone(opener, project, tmp_path):
    own = tmp_path / "mine"
    git(project, "worktree", "add", "-q", "--detach", str(own), "HEAD")
    assert worktrees(project)[0] == str(own)
    opener("HEAD").open()
    assert str(own) in worktrees(project)


def test_hook_of_the_users_does_not_run(opener, repository, tmp_path):
    hook = write(repository / ".git/hooks/post-checkout", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    opener("HEAD").open()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("nowhere", ""),
        ("0123456789012345678901234567890123456789", ""),
        ("v1:project/train.py", ""),
        ("HEAD~9", ""),
        ("v11", " (did you mean 'v1'?)"),
    ],
)
def test_ref_that_is_no_commit_is_named_with_what_to_do(opener, project, ref, hint):
    with pytest.raises(SpecError) as caught:
        opener(ref).open()
    message = str(caught.value)
    assert message.startswith(f"--aorta-ab={ref}: {ref!r} is not a commit of this clone{hint}; ")
    assert "git fetch, or fetch-depth: 0" in message
    assert worktrees(project) == []


def test_commit_that_a_shallow_clone_lacks_is_reported_with_the_remedy(repository, tmp_path):
    git(repository, "commit", "--allow-empty", "--message=newer")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth=1", f"file://{repository}", str(shallow))
    message = r"--aorta-ab=v1: 'v1' is not a commit of this clone, which is shallow; .*fetch"
    with pytest.raises(SpecError, match=message):
        check_reference("v1", shallow)
    check_reference("HEAD", shallow)


def test_interpreter_is_looked_for_from_the_root_folder(tmp_path):
    message = f"--aorta-ab=python:env/bin/python: there is no program {tmp_path}/env/bin/pyt"
    with pytest.raises(SpecError, match=message):
        check_reference("python:env/bin/python", tmp_path)
    write(tmp_path / "env/bin/python").chmod(0o755)
    check_reference("python:env/bin/python", tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "rootdir", "message"),
    [
        ("PATH", "", "top/project", "git is not installed, or not on the path"),
        ("GIT_CEILING_DIRECTORIES", "", "", "git .*fatal: not a git repository"),
        ("XDG_CACHE_HOME", "top/project/.cache", "top/project", ".*set XDG_CACHE_HOME to a folder outside of it"),
    ],
    ids=["no git", "no repository", "cache in the repository"],
)
def test_folder_that_can_not_be_checked_out_is_reported(
    opener, repository, tmp_path, monkeypatch, variable, value, rootdir, message
):
    monkeypatch.setenv(variable, str(tmp_path / value))
    with pytest.raises(SpecError, match=f"--aorta-ab=HEAD: {message}"):
        opener("HEAD", tmp_path / rootdir).open()


def test_root_folder_that_the_commit_lacks_is_reported(opener, repository):
    (repository / "younger").mkdir()
    with pytest.raises(SpecError, match="--aorta-ab=HEAD: pytest's root folder does not exist there: younger"):
        opener("HEAD", repository / "younger").open()


def request_of(project: Path, **config: object) -> LaunchRequest:
    spec = find_workload("toy", [project / "workloads"])
    return LaunchRequest("toy", spec, resolve_config(spec, config), None, ())


def script_request(script: str) -> LaunchRequest:
    return LaunchRequest("train.py", None, {"args": []}, script, ())


def test_installed_workload_stays_what_it_is(opener, project):
    installed = project / ".venv/lib/python3.11/site-packages/toys/toy"
    write(installed / "default.yaml", toy_yaml())
    spec = read_workload("toy", installed, "toys.toy")
    assert opener("HEAD").open().workload(spec) is spec


OWN_WORKLOADS = {
    "same keys": (toy_yaml(), {"steps": 9, "mode": "slow"}, {"steps": 9, "mode": "slow"}),
    "new key at its default": (toy_yaml("speed"), {"steps": 9, "speed": "fast"}, {"steps": 9, "mode": "fast"}),
    "removed key": (toy_yaml().rpartition("  mode")[0], {}, {"steps": 4, "mode": "fast"}),
}


@each_of("yaml, given, config", OWN_WORKLOADS)
def test_own_workload_is_the_commits_with_the_keys_that_the_commit_has(opener, project, yaml, given, config):
    write(project / "workloads/toy/default.yaml", yaml)
    reference = opener("HEAD").open()
    request = at_reference(request_of(project, **given), reference)
    assert request.spec is not None
    assert request.spec.folder == reference.root / "workloads/toy"
    assert request.config == config | {"environment": {}}


@pytest.mark.parametrize(
    ("yaml", "config", "message"),
    [
        (toy_yaml("speed"), {"speed": "slow"}, r"at HEAD: .*workload 'toy' has no config keys \['speed'\]; there are"),
        (toy_yaml(values="[fast, new]", default="new"), {}, "at HEAD: .*mode: 'new' is not one of .*"),
    ],
    ids=["key", "value"],
)
def test_config_that_the_commit_does_not_know_is_reported(opener, project, yaml, config, message):
    write(project / "workloads/toy/default.yaml", yaml)
    with pytest.raises(SpecError, match=message):
        at_reference(request_of(project, **config), opener("HEAD").open())


def test_shared_keys_are_the_commits(opener, project):
    keys = toy_yaml().partition("class: Toy")[2]
    write(project / "workloads/toy/default.yaml", "description: toy\nclass: Toy\nextends: shared.yaml\n")
    write(project / "workloads/shared.yaml", keys.replace("default: 4", "default: 5"))
    git(project, "add", "-A")
    git(project, "commit", "-qm", "shared")
    write(project / "workloads/shared.yaml", keys)
    assert at_reference(request_of(project, steps=7), opener("HEAD").open()).config["steps"] == 7
    request = at_reference(request_of(project), opener("HEAD").open())
    assert request.spec is not None
    assert request.spec.properties["steps"]["default"] == 5


def test_script_is_the_commits_and_a_file_of_no_repository_stays(opener, project):
    reference = opener("HEAD").open()
    assert at_reference(script_request(str(project / "train.py")), reference).script == str(reference.root / "train.py")
    for script in ("/elsewhere/train.py", "package.train"):
        assert at_reference(script_request(script), reference).script == script


def test_workload_or_script_that_the_commit_lacks_is_reported(opener, project):
    write(project / "workloads/young/default.yaml", toy_yaml())
    young = LaunchRequest("young", find_workload("young", [project / "workloads"]), {}, None, ())
    for request, lacking in (
        (young, r"workload 'young' does not exist at v1: there is no .*/young"),
        (script_request(str(write(project / "young.py"))), r"script '.*young\.py' does not exist at v1: there is no "),
    ):
        with pytest.raises(SpecError, match=lacking):
            at_reference(request, opener("v1").open())


def test_packages_are_looked_for_in_the_commit_first(opener, repository, project, tmp_path):
    reference = commit_reference(opener("HEAD"))
    given = {"PYTHONPATH": f"{repository}/lib::relative:/elsewhere"}
    path = launch_environment(make_plan(tmp_path, reference=reference), given)["PYTHONPATH"].split(":")
    root, tree = str(reference.root), str(reference.root.parent)
    assert path == [str(reference.worktree.packages), f"{root}/src", root, f"{tree}/lib", "relative", "/elsewhere"]


def test_link_to_the_harness_is_never_absent_while_another_session_opens_it(opener, monkeypatch):
    first, create = commit_reference(opener("HEAD")), Path.symlink_to
    link = first.worktree.packages / "pytest_aorta"
    assert link.resolve() == PACKAGE_ROOT

    def watched(path: Path, target: Path, **kind: bool) -> None:
        assert link.resolve() == PACKAGE_ROOT
        create(path, target, **kind)

    monkeypatch.setattr(Path, "symlink_to", watched)
    assert opener("HEAD").open() == first
    assert link.resolve() == PACKAGE_ROOT
    assert list(link.parent.iterdir()) == [link]


def test_link_to_a_package_may_be_made_by_another_search_at_the_same_time(opener, project, monkeypatch):
    write(project / "workloads/__init__.py")
    monkeypatch.syspath_prepend(project)
    spec = read_workload("toy", project / "workloads/toy", "workloads.toy")
    reference, create = commit_reference(opener("HEAD")), Path.symlink_to

    def made_before(path: Path, target: Path, **kind: bool) -> None:
        create(path, target, **kind)
        create(path, target, **kind)

    monkeypatch.setattr(Path, "symlink_to", made_before)
    assert reference.workload(spec).folder == reference.root / "workloads/toy"
    assert (reference.worktree.packages / "workloads").resolve() == reference.root / "workloads"


def test_package_called_otherwise_than_its_folder_leads_to_the_commits(opener, project, tmp_path, monkeypatch):
    (tmp_path / "installed").mkdir()
    write(project / "workloads/__init__.py")
    (tmp_path / "installed/renamed").symlink_to(project / "workloads")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    spec = read_workload("toy", project / "workloads/toy", "renamed.toy")
    reference = commit_reference(opener("HEAD"))
    for _ in range(2):
        assert reference.workload(spec).module == "renamed.toy"
    assert (reference.worktree.packages / "renamed").resolve() == reference.root / "workloads"


def test_plan_tells_the_commit_and_starts_ranks_without_the_current_folder(opener, project, tmp_path):
    plan = make_plan(tmp_path, reference=opener("v1").open())
    assert plan.title == "toy at v1"
    assert plan.reference.commit == git(project, "rev-parse", "v1")
    command = agent_command(plan)
    assert command[:4] == [sys.executable, "-P", "-m", "pytest_aorta.launch.process.torchrun"]
    assert command[-7:-1] == ["--no-python", sys.executable, "-P", "-u", "-m", "pytest_aorta.launch.process.rank"]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The interpreter of an environment that finds this one's packages where no package is looked for."""
    if not find_spec("torch"):
        pytest.skip("torch is not installed")
    command = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")]
    subprocess.run(command, check=True, timeout=60)
    (tmp_path / "needed").symlink_to(Path(msgspec.__file__).parents[1])
    python = tmp_path / "other/bin/python"
    install(python, "base.pth", str(tmp_path / "needed"))
    for name, text in [
        ("toys/__init__.py", ""),
        ("toys/toy/__init__.py", ""),
        ("toys/toy/default.yaml", toy_yaml()),
        ("toys-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n"),
        ("toys-1.0.dist-info/entry_points.txt", "[aorta.workloads]\ntoy = toys.toy\n"),
        ("toys-1.0.dist-info/RECORD", "toys/__init__.py,,\ntoys-1.0.dist-info/METADATA,,\n"),
    ]:
        install(python, name, text)
    return python


def install(environment: Path, name: str, text: str = "") -> Path:
    [site_packages] = environment.parents[1].glob("lib/python*/site-packages")
    return write(site_packages / name, text)


def test_other_environment_runs_what_is_installed_there_with_this_package(opener, environment, project, tmp_path):
    reference = opener(f"python:{environment}").open()
    spec = read_workload("toy", project / "workloads/toy", "mine.toy")
    there = reference.workload(spec)
    assert (there.module, there.folder.parts[-3:]) == ("toys.toy", ("site-packages", "toys", "toy"))
    plan = make_plan(tmp_path, reference=reference)
    environ = launch_environment(plan, {"PYTHONPATH": "/mine", "PYTHONHOME": "/home"})
    assert {name: environ.get(name) for name in ("PYTHONPATH", "PYTHONHOME", "AORTA_LATE_PATH")} == {
        "PYTHONPATH": str(reference.harness),
        "PYTHONHOME": None,
        "AORTA_LATE_PATH": f"/mine:{project}",
    }
    assert (reference.harness / "pytest_aorta").resolve() == PACKAGE_ROOT
    assert agent_command(plan)[0] == str(environment)
    assert convert(to_builtins(plan), LaunchPlan, "plan") == plan


def test_own_folder_and_script_are_the_same_in_another_environment(opener, environment, project):
    reference = opener("python:../../other/bin/python").open()
    assert (reference.python, reference.root) == (str(project / "../../other/bin/python"), project)
    request = request_of(project)
    assert at_reference(request, reference) == request
    script = script_request(str(project / "train.py"))
    assert at_reference(script, reference) == script


def test_workload_that_another_environment_lacks_is_reported(opener, environment, project):
    reference = opener(f"python:{environment}").open()
    spec = read_workload("absent", project / "workloads/toy", "mine.absent")
    with pytest.raises(
        SpecError, match=rf"workload 'absent' does not exist at {reference.name}: it has \[.*'toy'.*inst"
    ):
        reference.workload(spec)


def test_environment_that_lacks_a_package_is_reported_with_its_name(opener, environment, tmp_path):
    (tmp_path / "needed").unlink()
    for lacking in (
        "can't import torch; install",
        "so install it there: ModuleNotFoundError: No module named 'msgspec'",
    ):
        with pytest.raises(SpecError, match=f"--aorta-ab=python:{environment}: {environment} .*{lacking}"):
            opener(f"python:{environment}").open()
        install(environment, "torch/__init__.py")


def test_interpreter_that_can_not_be_run_is_reported(opener, project):
    with pytest.raises(SpecError, match="there is no program /absent/python"):
        opener("python:/absent/python").open()
    broken = write(project / "python", "#!/bin/sh\necho no such option >&2\nexit 2\n")
    broken.chmod(0o755)
    with pytest.raises(SpecError, match=r"can't run this version of pytest-aorta, so install it there: no such option"):
        opener("python:python").open()


@pytest.fixture(params=["pip", "uv"])
def wheels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that packages are installed from."""
    folder = tmp_path / "wheels"
    for version in ("1.0", "2.0"):
        make_wheel(folder, "marked", version)
    make_wheel(folder, "toys", "2.0", requires=("marked>=2",))
    if request.param == "uv" and shutil.which("uv", path=cache.command_environment()["PATH"]) is None:
        pytest.skip("uv is not installed")
    if request.param == "pip":
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("PIP", "UV"):
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(folder))
    return folder


def versions_of(reference: Reference) -> dict[str, str]:
    program = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    known = json.loads(subprocess.run([reference.python, "-c", program], check=True, capture_output=True).stdout)
    return {name: version for name, version in known.items() if name in ("marked", "toys")}


@pytest.mark.extended
def test_environment_with_a_requirement_is_built_once_and_leaves_its_base_alone(environment, project, wheels):
    said: list[str] = []
    side = f"with:toys>=2 python:{environment} env:NCCL_ALGO=Ring"
    for _ in range(2):
        reference = References(side, project, said.append).open()
    assert versions_of(reference) == {"marked": "2.0", "toys": "2.0"}
    assert versions_of(References(f"python:{environment}", project, print).open()) == {"toys": "1.0"}
    assert [line.partition(": ")[2] for line in said] == ["an environment is built"]
    assert "NCCL_ALGO Ring -> unset" in reference.differs
    plan = make_plan(project, reference=reference)
    assert launch_environment(plan, {"NCCL_ALGO": "Tree"})["NCCL_ALGO"] == "Ring"
    # What was killed before it was complete is built again, and so is what was built of other packages.
    (Path(reference.python).parents[1] / "ready").unlink()
    assert References(side, project, said.append).open() == reference
    assert [line.partition(": ")[2] for line in said[1:]] == ["it was not finished", "an environment is built"]
    install(environment, "more-1.0.dist-info/METADATA", "Name: more\nVersion: 1.0\n")
    assert References(side, project, said.append).open() != reference


def test_environment_is_built_of_a_commits_own_requirements(environment, project, repository, wheels):
    for version in ("1.0", "2.0"):
        write(project / "requirements.txt", f"marked=={version}\n")
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", version)
    side = f"HEAD~1 lock:requirements.txt python:{environment}"
    with pytest.raises(SpecError, match="can't import torch"):
        References(side, project, print).open()
    make_wheel(wheels, "needed", "1.0", path=str(wheels.with_name("needed")))
    reference = References(f"{side} with:needed", project, print).open()
    assert versions_of(reference) == {"marked": "1.0"}
    assert (reference.root / "requirements.txt").read_text() == "marked==1.0\n"
    with pytest.raises(SpecError, match=r"--aorta-ab=lock:absent.txt: there is no file .*/project/absent.txt"):
        check_reference("lock:absent.txt", project)


def test_requirement_that_can_not_be_installed_is_reported_in_the_installers_words(environment, project, wheels):
    for _ in range(2):
        with pytest.raises(SpecError, match=r"--aorta-ab=with:marked==9.*: with:marked==9: .*marked==9.*setup\.log"):
            References(f"with:marked==9 python:{environment}", project, print).open()


def test_lock_file_of_uv_is_installed_by_uv(environment, project, wheels):
    write(project / "pyproject.toml", '[project]\nname = "x"\nversion = "1"\ndependencies = ["marked<2", "needed"]\n')
    make_wheel(wheels, "needed", "1.0", path=str(wheels.with_name("needed")))
    side = f"lock:uv.lock python:{environment}"
    uv = shutil.which("uv", path=cache.command_environment()["PATH"])
    if uv is None:
        write(project / "uv.lock")
        with pytest.raises(SpecError, match=r"--aorta-ab=lock:uv.lock .*uv.lock: it needs uv, which is not installed"):
            References(side, project, print).open()
        return
    subprocess.run([uv, "lock", "-q"], cwd=project, check=True)
    assert versions_of(References(side, project, print).open()) == {"marked": "1.0"}


def test_variable_that_no_config_may_set_is_refused(project):
    with pytest.raises(SpecError, match=r"--aorta-ab=env:LD_PRELOAD=x: env: .*got \['LD_PRELOAD'\], allowed"):
        check_reference("env:LD_PRELOAD=x", project)


@pytest.mark.parametrize(
    ("path", "is_source"),
    [
        ("lib/a.py", True),
        (".venv/lib/python3.11/site-packages/a.py", False),
        ("usr/lib/python3/dist-packages/a.py", False),
        ("../beside/a.py", False),
        ("", True),
    ],
)
def test_source_of_a_checkout_is_reported_from_environments_inside_of_it(tmp_path, path, is_source):
    checkout = tmp_path / "site-packages"
    assert is_source_of(checkout, checkout / path) is is_source
