"""A project of a user, with a workload `toy` whose launches are faked: no process is started."""

import html
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # noqa: F401
import numpy  # noqa: F401 - pytester forgets what an inner run imported, and numpy refuses to be loaded twice
import pynvml  # noqa: F401
import pytest
import scipy.special  # noqa: F401 - as numpy

# What a run imports late: without these lines, each of the several hundred inner runs would import it again.
import pytest_aorta.plugin.fixtures
import pytest_aorta.plugin.summary
import pytest_aorta.report.write
import pytest_aorta.session.baselines
import pytest_aorta.session.history
import pytest_aorta.session.session  # noqa: F401
from tests.unit.builders import git, nightly, read_json, write

TOY_YAML = """
description: a toy
class: Toy
min_world_size: 2
config:
  steps: {type: integer, minimum: 1, default: 4, description: measured steps}
  step_ms: {type: number, minimum: 0, default: 10.0, description: time of each step}
  weight_hash: {type: [string, "null"], default: "0000000000000000", description: what the weights hash to}
  hash_every: {type: integer, minimum: 0, default: 1, description: steps between hashes}
  hash_tensors: {type: array, default: [], description: what is hashed tensor by tensor}
  hash_tensors_step: {type: [integer, "null"], default: null, description: in which step}
  fault: {type: object, default: {}, description: what goes wrong}
"""

# Of what workers send to the controller, test_xdist_in_pytest.py and test_retries_in_pytest.py are tests of every run.
ALONE_AND_NIGHTLY_ON_XDIST = pytest.mark.parametrize("workers", [[], nightly(["-n1"])], ids=["one process", "xdist"])
FAKE_LAUNCHER = """
import errno
import json
import os
import time

import pytest
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.plugin.hooks import RUN


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    gpus = json.loads((session.config.rootpath / "gpus.json").read_text())
    if gpus:
        run = session.config.stash[RUN]
        run.session.devices = [Device(str(number), "Toy GPU", f"GPU-{number}") for number in range(gpus)]


def pytest_aorta_make_launcher(config):
    return FakeLauncher(config.rootpath)


class FakeLauncher:
    def __init__(self, rootpath):
        self.rootpath = rootpath

    def launch(self, plan):
        return fake_launch(plan, self.rootpath)

    def close(self):
        pass


def fake_launch(plan, rootpath):
    prepare_folder(plan)
    config = {"steps": 4, "step_ms": 10.0, "weight_hash": None, "fault": {}} | plan.config
    config |= config["fault"] | planted(plan, rootpath)
    time.sleep(config.get("sleeps", 0))
    if config.get("interrupted"):
        raise KeyboardInterrupt
    if config.get("full_disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for rank in plan.world.ranks:
        folder = plan.run_dir / "ranks" / str(rank)
        if config.get("raises") == rank:
            message = config.get("message", "boom")
            error = {"time_ns": 1, "type": "ValueError", "message": message, "traceback": "  at train.py:7"}
            (folder / "error.json").write_text(json.dumps(error))
        elif config.get("raises") is None:
            (folder / "result.json").write_text(json.dumps(rank_result(config, rank, plan.world.device)))
    if plan.profiler and not config.get("without_trace"):
        (plan.run_dir / "ranks" / "0" / "trace.json.gz").touch()
    status = 0 if config.get("raises") is None else 1
    return LaunchOutcome("exit", status, (), (), config.get("wall_s", 0.25))


def planted(plan, rootpath):
    fault = json.loads((rootpath / "fault.json").read_text())
    if fault.pop("only", "") not in plan.run_dir.parent.name:
        return {}
    number = int(plan.run_dir.name.split("-")[0])
    side = fault.pop("reference" if plan.reference else "candidate", {})
    fault.pop("candidate", None), fault.pop("reference", None)
    by_launch = fault.pop("by_launch", {}).get(str(number), {})
    fault = fault | side | by_launch
    # A list has a value for each launch of the test, and its last one for those after it.
    place = {key: min(number, len(value)) - 1 for key, value in fault.items() if isinstance(value, list)}
    return {key: value[place[key]] if key in place else value for key, value in fault.items()}


def rank_result(config, rank, device):
    wrong = config.get("wrong", 0) if rank == 1 else 0
    steps = config["steps"]
    detail = {
        "kind": "all_gather", "iteration": 2, "rank": 1, "layer": 3, "source_rank": 0, "index": 5, "count": 7,
        "total": 16, "expected": 1.0, "actual": 0.0, "cause": "zeroed",
    }
    step_ms = config["step_ms"] * config.get("slowdown", 1)
    grow = config.get("memory_growth")
    return {
        "passed": not wrong,
        "failure_count": wrong,
        "failures": [detail] * wrong,
        "configured_iterations": steps,
        "total_iterations": steps,
        "step_times_ms": [step_ms * (1 + config.get("step_growth", 0) * step / steps) for step in range(steps)],
        "elapsed_sec": 0.1,
        "main_work_started": True,
        "metrics": {"tokens_per_s": 1000 / step_ms if step_ms else 0} | config.get("metrics", {}),
        "weight_hashes": config.get("weight_hashes") or (
            {} if config["weight_hash"] is None else {"4": config["weight_hash"]}
        ),
        "loss": list(config.get("losses", {}).values()),
        "grad_norm": list(config.get("losses", {}).values()),
        "tensor_hashes": {
            kind: {"names": ["w", "v"], "shapes": [[2, 3], [4]], "steps": {step: [hashed, "0" * 32]}}
            for kind in config.get("hash_tensors", ())
            if kind in ("weights", "gradients")
            for step, hashed in [(str(config["hash_tensors_step"]), config.get("tensor_hash", "0" * 32))]
        },
        "environment": {"torch": config.get("torch", "2.11.0"), "device": device} | config.get("facts", {}),
        "collective_ms": [config["waits"][str(rank)]] * steps if "waits" in config else [],
        "memory_bytes": [int(2**20 * (1 + grow * place / 20)) for place in range(20)] if grow is not None else [],
        **({"costs": config["costs"]} if "costs" in config else {}),
    }
"""

TWO_TESTS = """
import pytest

@pytest.mark.overlap
def test_speed(workload):
    workload.check(workload.run("toy"))

@pytest.mark.numerics
@pytest.mark.tolerance(step_time_mean="200%")
def test_weights(workload):
    workload.check(workload.run("toy", steps=6))
"""


# The step times of ten launches on a stable machine.
STEADY = [10.0, 10.02, 9.98, 10.01, 9.99, 10.0, 10.03, 9.97, 10.01, 10.0]

# On CPU ranks, step times are compared only if a marker names them; a test's own marker takes precedence.
TIMED = """
import pytest
pytestmark = pytest.mark.tolerance(step_time_p50="{}%")
"""

# The inner pytest runs in this process, where the plugin has been imported already.
INI = """[pytest]
addopts = --strict-markers -p no:rerunfailures -p no:randomly -p no:hypothesispytest
filterwarnings =
    error
    ignore:Module already imported:pytest.PytestAssertRewriteWarning
"""


def ended(result: pytest.RunResult, shows: str | Sequence[str], outcomes: dict[str, int]) -> pytest.RunResult:
    if outcomes:
        result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([shows] if isinstance(shows, str) else shows)
    return result


class Project:
    """The user's project in pytester's folder."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path: Path = pytester.path
        self.baselines = self.path / "baselines"
        self.ini()
        pytester.makeconftest(FAKE_LAUNCHER)
        self.write("workloads/toy/default.yaml", TOY_YAML)
        self.gpus(0)
        self.plant()

    def write(self, name: str, text: str) -> Path:
        return write(self.path / name, text)

    def read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def gpus(self, number: int) -> None:
        """Set the number of simulated GPUs."""
        self.write("gpus.json", json.dumps(number))

    def plant(self, **fault: object) -> None:
        """Plant a fault in the launches to come.

        ``only`` names the test with the fault, ``reference`` and ``candidate`` contain faults of that side's launches,
        ``by_launch`` faults by the number of the launch, and ``locating`` those of launches that locate costs. A list
        gives a value for each launch.
        """
        self.write("fault.json", json.dumps(fault))

    def ini(self, *lines: str) -> None:
        self.pytester.makeini("\n".join([INI, *lines]))

    def let_in(self, plugin: str) -> None:
        """Let the runs load a plugin that the ini file disables."""
        text = self.read("tox.ini")
        assert f" -p no:{plugin}" in text
        self.write("tox.ini", text.replace(f" -p no:{plugin}", ""))

    def test_file(self, source: str = TWO_TESTS) -> Path:
        has_gpus = self.read("gpus.json") != "0"
        return self.write("test_toy.py", source + TIMED.format(5 if has_gpus else 100))

    def one_test(self, body: str, marks: str = "") -> Path:
        return self.test_file(f"import pytest\n\n{marks}\ndef test_one(workload, distributed_world):\n    {body}\n")

    def tests_of(self, calls: Iterable[str], before: str = "pass") -> None:
        """Write a test for each call, so that one run covers all of them."""
        self.test_file(
            "import pytest\n\n"
            + "\n".join(
                f"def test_{number}(workload, distributed_world, request):\n    {before}\n    {call}\n"
                for number, call in enumerate(calls)
            )
        )

    def run(self, *arguments: str, shows: str | Sequence[str] = (), **outcomes: int) -> pytest.RunResult:
        """Run pytest in this process, or apart if xdist or pytest-rerunfailures would leave threads and sockets behind.

        A process of its own takes five times as much processor time. The outcomes have to be those that are given, if
        any, and the output has to show these lines in this order.
        """
        lets_in_reruns = "-p no:rerunfailures" not in self.read("tox.ini")
        if lets_in_reruns or any(re.match(r"-n\d", argument) for argument in arguments):
            return self.run_apart(*arguments, shows=shows, **outcomes)
        result = self.pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        return ended(result, shows, outcomes)

    def run_apart(self, *arguments: str, shows: str | Sequence[str] = (), **outcomes: int) -> pytest.RunResult:
        """Run pytest in a process of its own."""
        result = self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=150)
        return ended(result, shows, outcomes)

    def refused(self, *arguments: str, shows: str) -> None:
        """Run pytest, which has to end with a usage error that shows this line."""
        result = self.run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([shows])

    def summary(self) -> dict[str, Any]:
        """Return what the page ``out/report.html`` of the last run shows: counts by outcome, and each test's entry."""
        page = self.read("out/report.html")
        totals = re.findall(r"<dt>(Tests|Verdicts)</dt>(.*?)</dd>", page)
        found: dict[str, Any] = {
            name.lower(): {outcome: int(count) for count, outcome in re.findall(r'">(\d+) ([\w ]+)</span>', badges)}
            for name, badges in totals
        }
        entries = page.split('data-name="')[1:]
        entries.sort(key=lambda entry: int(re.findall(r'data-place="(\d+)', entry)[0]))
        return found | {
            "entries": [
                {
                    "test": html.unescape(entry.split('"')[0]),
                    "outcome": re.findall(r'<span class="badge [^>]*>([\w ]+)<', entry)[0],
                    "verdicts": {
                        metric: outcome
                        for outcome, metric in re.findall(r'data-outcome="([^"]+)" data-metric="([^"]+)"', entry)
                    },
                }
                for entry in entries
            ]
        }

    def obstacle(self, name: str) -> str:
        """Return a statement for a test that puts a file in the place of a folder, after options were checked."""
        return f"open({str(self.path / name)!r}, 'x').close()"

    def planned(self) -> list[str]:
        """Return the reference of each launch in the folder ``kept``, in order; empty for the code under test."""
        plans = [read_json(path) for path in sorted((self.path / "kept").rglob("plan.json"))]
        return [(plan.get("reference") or {"name": ""})["name"] for plan in plans]

    def git(self, *arguments: str) -> str:
        """Run git in the project's folder."""
        return git(self.path, *arguments)

    def baseline_files(self) -> list[Path]:
        return sorted(self.baselines.rglob("*.json"))

    def record(self, files: dict[Path, bytes]) -> None:
        """Write the baselines in ``files``; if ``files`` is empty, record the tests' baselines into it."""
        for path, content in files.items():
            self.write(str(path), content.decode())
        if not files:
            assert self.run("--update-baselines").ret == 0
            files |= {path.relative_to(self.path): path.read_bytes() for path in self.baseline_files()}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    # Tests behave the same on a machine with GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Other tests launch at the same time, with leases of their own.
    monkeypatch.setenv("AORTA_LEASE_DIR", str(pytester.path / "leases"))
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    return Project(pytester)


@pytest.fixture
def gpu(project: Project) -> Project:
    """The project on two GPUs, with the one test that compares the toy."""
    project.gpus(2)
    project.one_test("workload.check(workload.run('toy'))")
    return project


@pytest.fixture(scope="session")
def recordings() -> dict[str, dict[Path, bytes]]:
    """Baseline files by the fixture that recorded them, so that pytest runs once in a session to record each set."""
    return {"learned": {}, "recorded": {}}


@pytest.fixture
def learned(gpu: Project, recordings: dict[str, dict[Path, bytes]]) -> Project:
    """The project of ``gpu``, with a baseline of ten launches that vary a little around 10 ms."""
    gpu.plant(step_ms=STEADY)
    gpu.record(recordings["learned"])
    gpu.plant()
    return gpu


@pytest.fixture
def versioned(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project in a repository, its worktrees in a cache of its own."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.path.parent / f"{project.path.name}-cache"))
    project.git("init", "-q")
    project.git("add", "workloads")
    project.git("commit", "-qm", "old")
    return project


@pytest.fixture
def versioned_gpu(versioned, learned):
    """The learned project in a repository; both are the same project."""
    return learned


@pytest.fixture
def recorded(project: Project, recordings: dict[str, dict[Path, bytes]]) -> Project:
    """The project with its two tests and their baselines."""
    project.test_file()
    project.record(recordings["recorded"])
    return project
