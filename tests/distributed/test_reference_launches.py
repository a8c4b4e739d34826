"""Launches of the reference version run the whole code of that version and leave nothing behind."""

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pytest_aorta
from tests.distributed.processes import mentioning, own_environ
from tests.unit.builders import git, nightly, read_json, run_python, write

OWN = """
import time
import torch.distributed as dist
import helper, library, plain
from pytest_aorta.worker import RankEnv, StepTimer, Workload, environment_facts
from .delay import DELAY_S

class Own(Workload):
    def setup(self):
        self.device = RankEnv.read().join("own")

    def run(self):
        timer = StepTimer(self.device)
        for _ in range(self.config["steps"]):
            with timer.step():
                time.sleep(DELAY_S)
        versions = {"helper": helper.VERSION, "library": library.VERSION, "plain": plain.VERSION}
        return timer.result(0.1).replace(metrics=versions, environment=environment_facts(self.device))

    def cleanup(self):
        dist.destroy_process_group()
"""
YAML = """
description: an own workload
class: Own
config:
  steps: {type: integer, minimum: 1, default: 3, description: measured steps}
"""
SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import helper, library
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
recorder.start(torch.device("cpu"))
with recorder.step():
    dist.barrier()
recorder.metric("helper", helper.VERSION)
recorder.metric("library", library.VERSION)
recorder.metric("data", float(Path(sys.argv[1]).read_text()))
dist.destroy_process_group()
"""
TESTS = """
import json
from pathlib import Path
import pytest
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plugin.hooks import RUN

pytestmark = [pytest.mark.world(size=2, device="cpu"), pytest.mark.launch_timeout(120)]

def launched(distributed_world, first, *references):
    results = [distributed_world.again(first, reference=reference) for reference in references]
    found = [
        {"metrics": result.rank_metrics, "fastest_ms": min(result.rank_step_times_ms[0]), "launcher": result.launcher}
        for result in results
    ]
    (Path(__file__).parent / f"{first.workload}.json").write_text(json.dumps(found))

def test_own(distributed_world):
    launched(distributed_world, distributed_world.run("own"), True, False)

def test_installed(distributed_world):
    launched(distributed_world, distributed_world.run("installed", steps=1), True, False)

def test_script(distributed_world):
    launched(distributed_world, distributed_world.run_script("train.py", ("data.txt",)), True, False)

def test_turns(distributed_world, request):
    first = distributed_world.run("own", steps=1)
    distributed_world.again(first, reference=True)
    servers = request.config.stash[RUN].session.launchers[LauncherKind.FORKSERVER]
    before = servers.pids
    distributed_world.again(first)
    distributed_world.again(first, reference=True)
    assert servers.pids == before
    assert len(before) == 2

def test_leak(distributed_world):
    distributed_world.again(distributed_world.run_script("leak.py"), reference=True)
"""
ENTRY_POINTS = "[aorta.workloads]\ninstalled = installed_workloads.installed\n"
# A finder like that of an editable installation: it finds only modules that no other finder finds.
FINDER = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {file!r}) if name == "elsewhere" else None

sys.meta_path.append(Finder)
"""
OLD, NEW = 1, 2
# Between the steps of the two versions, with room for a busy machine.
BETWEEN_MS = 250


def delay_s(version: int) -> float:
    return 0.01 if version == OLD else 0.5


FILES = {
    "workloads/own/__init__.py": lambda version: OWN,
    "workloads/own/default.yaml": lambda version: YAML,
    "workloads/own/delay.py": lambda version: f"DELAY_S = {delay_s(version)}\n",
    "mine/__init__.py": lambda version: "",
    "mine/installed/__init__.py": lambda version: OWN,
    "mine/installed/default.yaml": lambda version: YAML,
    # The import uses the package's own name, as for a module that another workload shares.
    "mine/installed/delay.py": lambda version: "from installed_workloads.shared import DELAY_S\n",
    "mine/shared.py": lambda version: f"DELAY_S = {delay_s(version)}\n",
    "helper.py": lambda version: f"VERSION = {version}.0\n",
    "src/library/__init__.py": lambda version: f"VERSION = {version}.0\n",
    "lib/plain.py": lambda version: f"VERSION = {version}.0\n",
    "train.py": lambda version: SCRIPT,
    "data.txt": lambda version: f"{version}",
    "odd/elsewhere.py": lambda version: "",
    "leak.py": lambda version: SCRIPT.split("recorder.metric")[0].replace("import helper", "import elsewhere"),
}

Runner = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a sub-folder of its repository, old at HEAD and new in the working tree."""
    top = tmp_path / "top"
    project = top / "project"
    for version in (OLD, NEW):
        for name, text in FILES.items():
            write(project / name, text(version))
        if version == OLD:
            git(tmp_path, "init", "-q", str(top))
            git(top, "add", "-A")
            git(top, "commit", "-qm", "old")
    write(project / "test_inner.py", TESTS)
    write(project / "pytest.ini", "[pytest]\n")
    # The package is installed in editable mode, under a name that no folder has.
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/installed_workloads").symlink_to(project / "mine")
    write(tmp_path / "installed/mine-1.dist-info/entry_points.txt", ENTRY_POINTS)
    write(tmp_path / "installed/mine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    write(tmp_path / "installed/sitecustomize.py", FINDER.format(file=str(project / "odd/elsewhere.py")))
    return project


@pytest.fixture
def run(project: Path, tmp_path: Path) -> Runner:
    """Runs the project's tests; afterwards no process is left."""
    path = [str(tmp_path / "installed"), str(project / "src"), str(project / "lib"), os.environ.get("PYTHONPATH")]
    changes = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ":".join(filter(None, path))}
    environ = own_environ(tmp_path / "leases", **changes)

    def run(*arguments: str) -> str:
        ended = run_python("-m", "pytest", "-p", "no:cacheprovider", "-ra", *arguments, cwd=project, env=environ)
        assert mentioning(str(tmp_path)) == []
        return ended.stdout + ended.stderr

    return run


def found(project: Path, name: str) -> list[dict]:
    return read_json(project / f"{name}.json")


def assert_two_versions(found: list[dict], launcher: str) -> None:
    assert [launch["launcher"] for launch in found] == [launcher] * 2
    for version, launch in zip((OLD, NEW), found, strict=True):
        assert launch["metrics"] == {name: [version] * 2 for name in launch["metrics"]}


@pytest.mark.parametrize("launcher", [nightly("torchrun"), "forkserver"])
def test_reference_runs_the_commits_code_and_the_present_harness(run, project, launcher):
    # As in our own repository, the checkout and the commit each contain a harness.
    harness = project / "pytest_aorta"
    write(harness / "__init__.py", "raise RuntimeError('the old harness')")
    git(project, "add", "pytest_aorta")
    git(project, "commit", "-qm", "old harness")
    shutil.rmtree(harness)
    shutil.copytree(Path(pytest_aorta.__file__).parent, harness)
    said = run("--aorta-ab=HEAD", "-k", "test_own", f"--aorta-launcher={launcher}")
    assert "1 passed" in said, said
    launches = found(project, "own")
    assert_two_versions(launches, launcher)
    assert launches[0]["fastest_ms"] < BETWEEN_MS < launches[1]["fastest_ms"]


@pytest.mark.extended
def test_warm_launches_of_both_versions_run_their_own_code_all_of_it(run, project):
    said = run("--aorta-ab=HEAD", "--aorta-launcher=forkserver")
    assert "4 passed" in said, said
    assert "1 failed" in said
    for name in ("own", "installed", "train.py"):
        assert_two_versions(found(project, name), "forkserver")
    for name in ("own", "installed"):
        old, new = found(project, name)
        assert old["fastest_ms"] < BETWEEN_MS < new["fastest_ms"]
    assert set(found(project, "train.py")[0]["metrics"]) == {"helper", "library", "data"}
    assert "ImportError: the launch of HEAD has imported elsewhere from the code under test: " in said


def other_environment(prefix: Path) -> Path:
    """Make an environment that uses this one's torch, and return its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, timeout=150)
    [there] = prefix.glob("lib/python*/site-packages")
    packages = [entry for entry in sys.path if Path(entry).name == "site-packages"] or site.getsitepackages()
    write(there / "base.pth", "\n".join(packages) + "\n")
    return there


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
def test_other_environments_reference_runs_what_is_installed_there(run, project, tmp_path, launcher):
    there = other_environment(tmp_path / "other")
    write(there / "library/__init__.py", f"VERSION = {OLD}.0\n")
    write(project / "data.txt", f"{OLD}")
    write(project / "helper.py", "import library\nVERSION = library.VERSION\n")
    said = run(f"--aorta-ab=python:{tmp_path}/other/bin/python", f"--aorta-launcher={launcher}", "-k", "script")
    assert "1 passed" in said, said
    old, new = found(project, "train.py")
    assert (old["launcher"], new["launcher"]) == (launcher, launcher)
    assert old["metrics"] == {"helper": [OLD] * 2, "library": [OLD] * 2, "data": [OLD] * 2}
    assert new["metrics"] == {"helper": [NEW] * 2, "library": [NEW] * 2, "data": [OLD] * 2}


@pytest.mark.extended
def test_command_whose_ranks_leave_the_other_environment_fails(run, project, tmp_path):
    other_environment(tmp_path / "other")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "program.py"]
    write(project / "program.py", SCRIPT.replace("import helper, library", "").partition("recorder.metric")[0])
    write(
        project / "test_program.py",
        f"""
import pytest

@pytest.mark.world(size=2, device="cpu")
def test_program(distributed_world):
    distributed_world.again(distributed_world.run_command({command}), reference=True)
""",
    )
    said = run(f"--aorta-ab=python:{tmp_path}/other/bin/python", "-k", "test_program", "test_program.py")
    assert "1 failed" in said, said
    assert f"ran in {sys.prefix} instead of {tmp_path}/other; start ranks by python -m" in said, said
