"""Warm launches: the state in which ranks start, failures, and processes left after a kill."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.common.errors import ColdLaunchWarning
from pytest_aorta.launch import warm
from pytest_aorta.launch.launchers import RankLauncher
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.result.diagnosis import LaunchFailure, launch_failure
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.reading import collect_result
from tests.distributed.processes import WARM_LIMITS_S, await_true, is_alive, living_children, rank_pids
from tests.unit.builders import make_plan, nightly, read_json, write

ROOT = Path(__file__).parents[2]
CONFIGS = {"fsdp": {"steps": 3, "warmup": 1, "verify": 2, "optimizer": "sgd"}, "llama_fsdp2": {"steps": 3, "warmup": 1}}
# Records a step, then rank 1 runs the code in the first argument.
SCRIPT = """
import json, os, random, signal, sys, time
import numpy, torch
import torch.distributed as dist
from pathlib import Path
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
recorder.start(torch.device("cpu"))
with recorder.step():
    dist.barrier()
if dist.get_rank() == 1:
    exec(sys.argv[1])
dist.barrier()
dist.destroy_process_group()
"""
# Leaves a file if its global is destroyed while the process is alive.
DESTROYED = """
class Group:
    path = Path(os.environ["AORTA_RANK_FOLDER"], "destroyed")
    def __del__(self):
        self.path.touch()

group = Group()
"""
# The script's global holds the last reference to the process group. Destroying the group deadlocks if a thread of gloo
# still has to free the last collective.
DDP = """
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(5):
    with recorder.step():
        model(torch.ones(2, 64)).sum().backward()
dist.destroy_process_group()
"""
# Records state that an earlier launch has left, and leaves state for the next launch.
TRACES = """
import gc, helper_of_mine
found = {
    "argv": sys.argv[1:],
    "path": [entry for entry in sys.path if entry != str(Path(__file__).parent)],
    "cwd": os.getcwd(),
    "left": [os.environ.get("AORTA_LEFT"), getattr(helper_of_mine, "left", None), hasattr(torch, "left")],
    "given": os.environ.get("AORTA_GIVEN"),
    "random": [random.random(), float(numpy.random.rand()), float(torch.rand(()))],
    "gc": gc.isenabled(),
    "environ": sorted(
        set(os.environ) - {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "AORTA_GIVEN"}
    ),
    "num_threads": torch.get_num_threads(),
    "sigint": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "handlers": [getattr(handler, "__name__", str(handler)) for handler in map(signal.getsignal, (1, 13, 15))],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "stdin": os.readlink("/proc/self/fd/0"),
    "session": os.getsid(0) == os.getpid(),
}
Path(os.environ["AORTA_FOUND"]).write_text(json.dumps(found))
os.environ["AORTA_LEFT"] = helper_of_mine.left = torch.left = "left"
torch.manual_seed(1)
gc.disable()
os.chdir("/")
"""
# A thread that still uses the process group when the script has ended, as an asynchronous checkpoint does.
LATE = """
import atexit, threading

def save():
    time.sleep(0.5)
    dist.all_reduce(torch.ones(1))
    Path(os.environ["AORTA_RANK_FOLDER"], "saved").touch()

atexit.register(dist.destroy_process_group)
threading.Thread(target=save).start()
"""

BROKEN_SERVER = """
import sys
if "pytest_aorta.launch.process.forkserver" in sys.orig_argv:
    raise SystemExit("no server today")
"""

# Starts a server, prints its process id and ends.
FROZEN_SERVER = """
import os, signal, sys
if "pytest_aorta.launch.process.forkserver" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""

Planner = Callable[..., LaunchPlan]


@pytest.fixture
def own_servers() -> Iterator[Callable[[dict[str, str]], ForkServers]]:
    """Provide fork servers that the test may kill."""
    with ExitStack() as stack:

        def make(environ: dict[str, str]) -> ForkServers:
            servers = ForkServers(environ)
            stack.callback(servers.close)
            return servers

        yield make


@pytest.fixture
def script_plan(tmp_path: Path) -> Planner:
    """Provide plans of the script above, each with its own folder."""
    write(tmp_path / "train.py", SCRIPT)
    write(tmp_path / "helper_of_mine.py", "")

    def plan(launcher: str, code: str, timeout_s: float = 120.0, **changes: Any) -> LaunchPlan:
        run_dir, script = tmp_path / f"{launcher}-{len(list(tmp_path.iterdir()))}", str(tmp_path / "train.py")
        changes |= {"launcher": launcher, "timeout_s": timeout_s}
        return make_plan(run_dir, name="train.py", config={}, script=script, args=(code,), cwd=ROOT, **changes)

    return plan


def workload_plan(launcher: str, name: str, run_dir: Path) -> LaunchPlan:
    spec = find_workload(name, ())
    config = resolve_config(spec, CONFIGS[name])
    return make_plan(
        run_dir, name=name, spec=spec, config=config, script=None, timeout_s=120.0, cwd=ROOT, launcher=launcher
    )


def run(servers: RankLauncher, plan: LaunchPlan) -> WorkloadResult:
    outcome = servers.launch(plan)
    assert launch_failure(plan, outcome) is None
    return collect_result(plan, outcome)


@pytest.mark.parametrize(
    ("launcher", "end"),
    [
        (LauncherKind.FORKSERVER, "raise SystemExit(0)"),
        (LauncherKind.FORKSERVER, "raise KeyError('lost')"),
        (LauncherKind.TORCHRUN, ""),
        nightly(LauncherKind.TORCHRUN, "raise SystemExit(0)"),
        nightly(LauncherKind.FORKSERVER, ""),
    ],
)
def test_rank_leaves_as_python_does_and_destroys_nothing_that_its_script_made(servers, script_plan, launcher, end):
    plan = script_plan(launcher, "")
    script = SCRIPT.replace("dist.destroy_process_group()", LATE)
    write(Path(plan.script), script + DESTROYED + end)
    failure = launch_failure(plan, servers.launch(plan))
    assert ("KeyError" in failure.text) if "KeyError" in end else failure is None
    assert "KeyError" in end or len(list(plan.run_dir.rglob("saved"))) == 2
    assert [path.name for path in plan.run_dir.rglob("destroyed")] == []


def test_rank_that_stays_after_its_script_returned_is_reported_as_that(servers, script_plan):
    stay = "sys.stdout = type('Stuck', (), {'write': len, 'flush': lambda self: time.sleep(600)})()"
    failure = run_into_hang(servers, script_plan, stay, "process left")
    assert "rank 1 did not leave after its script returned in step 1" in failure.text


@pytest.mark.extended
def test_ten_warm_launches_of_a_ddp_script_end_beside_busy_processes(servers, script_plan):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for _ in range(10):
            plan = script_plan(LauncherKind.FORKSERVER, "")
            write(Path(plan.script), DDP)
            run(servers, plan)
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["fsdp", nightly("llama_fsdp2")])
def test_warm_launch_computes_the_same_as_a_cold_launch(servers, tmp_path, name):
    warm = run(servers, workload_plan(LauncherKind.FORKSERVER, name, tmp_path / "warm"))
    cold = run(servers, workload_plan(LauncherKind.TORCHRUN, name, tmp_path / "cold"))
    assert (warm.launcher, cold.launcher) == (LauncherKind.FORKSERVER, LauncherKind.TORCHRUN)
    assert warm.passed
    assert warm.weight_hashes == cold.weight_hashes != {}
    assert warm.loss == cold.loss
    assert warm.environment == cold.environment


def test_launch_inherits_no_state_of_the_previous_launch(servers, script_plan, tmp_path, monkeypatch):
    found = []
    for number, launcher in enumerate((LauncherKind.FORKSERVER, LauncherKind.FORKSERVER, LauncherKind.TORCHRUN)):
        monkeypatch.setenv("AORTA_FOUND", str(tmp_path / f"found-{number}"))
        monkeypatch.delenv("AORTA_GIVEN", raising=False) if number else monkeypatch.setenv("AORTA_GIVEN", "once")
        assert run(servers, script_plan(launcher, TRACES)).launcher == launcher
        found.append(read_json(tmp_path / f"found-{number}"))
    randoms, given = ([launch.pop(name) for launch in found] for name in ("random", "given"))
    assert found[0] == found[1] == found[2]
    assert found[0]["left"] == [None, None, False]
    assert given == ["once", None, None]
    assert len({number for triple in randoms for number in triple}) == 9


def run_into_hang(servers: RankLauncher, script_plan: Planner, code: str, kind: str) -> LaunchFailure:
    """Return the failure of the first launch that hangs as ``kind`` says, with room for ranks that start late."""
    for limit_s in WARM_LIMITS_S:
        failure = run_into_failure(servers, script_plan(LauncherKind.FORKSERVER, code, timeout_s=limit_s))
        if failure.kind == kind:
            break
    assert (failure.kind, failure.rank) == (kind, 1), failure.text
    return failure


def run_into_failure(servers: RankLauncher, plan: LaunchPlan) -> LaunchFailure:
    """Return the failure of a launch, after checking that no rank is left."""
    outcome = servers.launch(plan)
    failure = launch_failure(plan, outcome)
    assert failure is not None
    assert outcome.launcher == plan.launcher
    assert outcome.survivors == ()
    assert len(rank_pids(plan.run_dir)) == 2
    assert not any(map(is_alive, rank_pids(plan.run_dir)))
    return failure


def test_warm_launch_fails_as_a_cold_launch_does(servers, script_plan):
    handler = "import atexit; atexit.register(os._exit, 5)"
    warm, cold = (
        run_into_failure(servers, script_plan(launcher, handler))
        for launcher in (LauncherKind.FORKSERVER, LauncherKind.TORCHRUN)
    )
    assert (warm.kind, warm.rank) == (cold.kind, cold.rank)
    assert warm.text.splitlines()[0] == cold.text.splitlines()[0]
    assert warm.rank == 1


# No closed connection of a peer shows the end, so only the guard notices: rank 0 waits at the store, or works for long.
EARLY = {
    "peer in a collective": "os._exit(0)",
    "peer at the store": "os._exit(0) if dist.get_rank() else dist.distributed_c10d._get_default_store().get('never')",
}


@pytest.mark.parametrize(
    ("code", "launcher"),
    [
        nightly(
            EARLY["peer in a collective"],
            LauncherKind.FORKSERVER,
            id="peer in a collective, warm",
        ),
        pytest.param(EARLY["peer at the store"], LauncherKind.FORKSERVER, id="peer at the store, warm"),
        nightly(
            EARLY["peer in a collective"],
            LauncherKind.TORCHRUN,
            id="peer in a collective",
        ),
        nightly(EARLY["peer at the store"], LauncherKind.TORCHRUN, id="peer at the store"),
    ],
)
def test_rank_that_exits_early_with_code_0_is_reported_at_once(servers, script_plan, tmp_path, launcher, code):
    write(tmp_path / "train.py", SCRIPT.replace("if dist.get_rank() == 1:", "if True:"))
    code = code if "if" in code else f"{code} if dist.get_rank() else None"
    failure = run_into_failure(servers, script_plan(launcher, code))
    assert (failure.kind, failure.rank) == ("result missing", 1), failure.text
    assert "rank 1 ended without a result or an error while others ran" in failure.text


def test_warm_launch_that_hangs_and_ignores_sigterm_is_ended_and_names_the_rank(servers, script_plan):
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    run_into_hang(servers, script_plan, ignoring, "hang in collective")


def test_lease_is_held_until_the_launch_is_over(servers, script_plan):
    read_fd, write_fd = os.pipe()
    plan = script_plan(LauncherKind.FORKSERVER, "", lease_fds=(write_fd,))
    run(servers, plan)
    os.close(write_fd)
    with os.fdopen(read_fd, encoding="utf-8") as held:  # ends when no process has the other end open
        assert held.read() == ""


def test_killed_server_is_replaced_and_so_is_the_one_unused_longest(own_servers, script_plan, monkeypatch):
    monkeypatch.setattr(warm, "MAX_SERVERS", 2)
    environ = dict(os.environ)
    servers = own_servers(environ)
    for value in ("1", "2", "1"):
        environ["MALLOC_ARENA_MAX"] = value
        run(servers, script_plan(LauncherKind.FORKSERVER, f"assert os.environ['MALLOC_ARENA_MAX'] == '{value}'"))
    unused, used = servers.pids
    environ["MALLOC_ARENA_MAX"] = "3"
    run(servers, script_plan(LauncherKind.FORKSERVER, ""))
    _, second = servers.pids
    assert servers.pids == [used, second]
    assert [is_alive(pid) for pid in (unused, used, second)] == [False, True, True]
    # A launch outlives the server that started it.
    killing = script_plan(LauncherKind.FORKSERVER, f"os.kill({second}, signal.SIGKILL)")
    assert run(servers, killing).launcher == LauncherKind.FORKSERVER
    assert run(servers, script_plan(LauncherKind.FORKSERVER, "")).launcher == LauncherKind.FORKSERVER
    _, third = servers.pids
    assert third != second
    await_true(lambda: living_children(third) == [])
    servers.close()
    assert not is_alive(third)
    assert servers.pids == []


def test_server_that_can_not_start_makes_the_launch_cold_with_a_warning(own_servers, script_plan, tmp_path):
    write(tmp_path / "sitecustomize.py", BROKEN_SERVER)
    servers = own_servers(dict(os.environ) | {"PYTHONPATH": str(tmp_path)})
    plan = script_plan(LauncherKind.FORKSERVER, "")
    with pytest.warns(ColdLaunchWarning, match=r"(?s)train.py: launched with torchrun.*unfit: .*no server today"):
        outcome = servers.launch(plan)
    assert launch_failure(plan, outcome) is None
    assert outcome.launcher == LauncherKind.TORCHRUN


@pytest.fixture
def chosen_launcher(monkeypatch):
    """Make launches return their launcher without starting it."""
    monkeypatch.setattr(warm, "launch", lambda plan, environ, start=None, launcher=LauncherKind.TORCHRUN: launcher)


def test_server_that_is_frozen_at_its_start_is_given_up_at_the_launchs_time_limit(
    own_servers, script_plan, tmp_path, chosen_launcher
):
    write(tmp_path / "sitecustomize.py", FROZEN_SERVER)
    servers = own_servers(dict(os.environ) | {"PYTHONPATH": str(tmp_path)})
    plan = script_plan(LauncherKind.FORKSERVER, "", timeout_s=2.0)
    with pytest.warns(ColdLaunchWarning, match="no answer within 2 s"):
        assert servers.launch(plan) == LauncherKind.TORCHRUN
    assert servers.pids == []


def test_launch_inherits_no_variable_of_a_launch_around_it_and_any_temporary_folder(own_servers, tmp_path):
    odd = tmp_path / 'a "quoted" \\name'
    odd.mkdir()
    servers = own_servers(os.environ | dict.fromkeys(variables.INTERNAL, "7") | {"TMPDIR": str(odd)})
    result = run(servers, workload_plan(LauncherKind.FORKSERVER, "fsdp", tmp_path / "run"))
    assert (result.passed, result.launcher) == (True, LauncherKind.FORKSERVER)


def test_workload_names_modules_for_the_server_to_import(servers, tmp_path, chosen_launcher):
    assert find_workload("llama_simple_fsdp", ()).preload
    plan = workload_plan(LauncherKind.FORKSERVER, "fsdp", tmp_path / "one")
    # No module that the server imports at its start needs this module.
    loaded = replace(plan, spec=replace(plan.spec, preload=("torch.utils.tensorboard_is_not_there",)))
    with pytest.warns(ColdLaunchWarning, match="can't import torch.utils.tensorboard_is_not_there: ModuleNotFound"):
        assert servers.launch(loaded) == LauncherKind.TORCHRUN


PRELOADING = """
import sys
from pytest_aorta.launch.process.forkserver import ForkServer, num_threads, preload
server = ForkServer(None, preload())
assert server.preload(["quiet", "threaded", "forking"]) is None
assert "quiet" in sys.modules and not {"threaded", "forking"} & set(sys.modules)
assert num_threads() <= server.num_threads_allowed
assert server.kept_out == [
    "each rank imports threaded, because it starts a thread when it is imported",
    "each rank imports forking, because it starts a process when it is imported",
]
"""
TO_PRELOAD = {
    "quiet": "",
    "threaded": (
        "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True, name='sleeper').start()"
    ),
    "forking": "import subprocess; process = subprocess.Popen(['sleep', '5'])",
}


def test_module_that_starts_a_thread_or_a_process_is_left_to_the_ranks(tmp_path):
    for name, code in TO_PRELOAD.items():
        write(tmp_path / f"{name}.py", code)
    subprocess.run([sys.executable, "-c", PRELOADING], cwd=tmp_path, check=True, timeout=120)
