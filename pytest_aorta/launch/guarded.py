"""A guarded launch of a plan, with the command line and the environment of its torchrun agent and ranks.

The guard starts the torchrun agent, which starts the ranks. The guard is a program of its own that runs torchrun. In a
warm launch it is a fork of the fork server (warm.py). Over several nodes each has a guard, and one watches the program
that starts the nodes' agents (nodes.py). A launch is over when none of its processes is left.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import PACKAGE_ROOT, UnreadableFile, raised_as, remove_scratch, write_json
from pytest_aorta.common.model import decode, to_builtins
from pytest_aorta.common.processes import start_apart
from pytest_aorta.launch.process.guard import ENDED, state_of
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.plan.accelerators import show_devices
from pytest_aorta.plan.cache import cache_folder
from pytest_aorta.plan.device_kind import Backend, DeviceKind
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, pinned_cpu_kernels
from pytest_aorta.result import folder as names
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

# torchrun reads PET_* before its flags, and ranks would read the other variables as their own.
_SCRUBBED_PREFIXES = ("PET_", "TORCHELASTIC_")
_SCRUBBED = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# Enough records for a few hundred steps of a dozen layers.
_FLIGHT_RECORDS = "20000"
GUARD = PACKAGE_ROOT / "launch" / "process" / "guard.py"
RANK_MODULE = "pytest_aorta.launch.process.rank"
STARTUP = PACKAGE_ROOT / "launch" / "process" / "startup"
# The guard itself stops a launch within 0.5 + 2 + 10 seconds: Python's stacks, SIGTERM and SIGKILL.
STOP_S = 20.0
# The keeper of a guard that was killed ends the guard's orphans within 10 seconds.
KEEPER_S = 12.0
# The kernel ends a rank of this host when its agent ends; over several nodes, each node ends its own first.
LEFT_S = 30.0
# Limit of the end of a launch over several nodes, in which the agents and then their launcher are ended.
NODES_END_S = 60.0


def require_torch() -> None:
    """Check that this machine runs Linux and that this interpreter, which starts the ranks, has torch.

    Raises:
        LaunchError: Either is not so.
    """
    if sys.platform != "linux":
        raise LaunchError(f"{sys.platform}: ranks are launched on Linux; use a container, a virtual machine or WSL 2")
    found = None
    with suppress(ImportError, ValueError):  # of a finder that refuses torch, or of a module without a spec
        found = importlib.util.find_spec("torch")
    if found is None:
        raise LaunchError(
            f"torch is not installed for {sys.executable}, which starts the ranks; install the build for this "
            "machine's CUDA, ROCm or CPU, as https://pytorch.org/get-started says, or pytest-aorta[torch]"
        )


def agent_command(plan: LaunchPlan) -> list[str]:
    """Return the command line of the torchrun agent, for one node or for this node's part of several.

    A command that starts ranks by itself is in the agent's place.
    """
    python, run_dir = python_command(plan), str(plan.run_dir)
    if plan.starts_ranks:
        program = find_program(plan.script or "", python[0]) or str(plan.script)
        return [program, *plan.args]
    return [
        *[*python, "-m", "pytest_aorta.launch.process.torchrun", run_dir],
        *[f"--nnodes={plan.world.nodes}", f"--node-rank={plan.node or 0}"],
        f"--nproc-per-node={plan.world.ranks_per_node}",
        # By default torchrun leaves a folder among the temporary files, where nothing deletes it.
        f"--log-dir={plan.run_dir / names.ELASTIC_FOLDER}",
        # torchrun's own option to start a module can't pass options to Python.
        *["--no-python", *rank_command(plan)],
    ]


def rank_command(plan: LaunchPlan) -> list[str]:
    """Return the command line of a rank."""
    return [*python_command(plan), "-u", "-m", RANK_MODULE, str(plan.run_dir)]


def find_program(name: str, python: str) -> str | None:
    """Return the path of a program, which is looked for beside the interpreter ``python`` first; None without it."""
    return shutil.which(name, path=_search_path(python, os.environ))


def _search_path(python: str, environ: Mapping[str, str]) -> str:
    return os.pathsep.join([str(Path(python).parent), environ.get("PATH", os.defpath)])


def python_command(plan: LaunchPlan) -> list[str]:
    """Return the interpreter, with its options, of this plan's torchrun agent and ranks."""
    if plan.reference is None:
        return [sys.executable]
    # Without -P the working folder would come first on the path, even if it contains other versions of our modules.
    return [plan.reference.python, "-P"]


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the torchrun agent and the ranks.

    It contains the caller's variables except those of another launch, then the config's variables, then ours.
    """
    # The user can name node 0's address in the network of the nodes; torchrun sets the variable anew for its ranks.
    scrubbed = (_SCRUBBED if plan.world.nodes == 1 else _SCRUBBED - {"MASTER_ADDR"}) | variables.INTERNAL
    kept = {
        key: value for key, value in environ.items() if key not in scrubbed and not key.startswith(_SCRUBBED_PREFIXES)
    }
    kept |= plan.config.get(ENVIRONMENT_KEY, {}) | (plan.reference.variables if plan.reference else {})
    show_devices(plan.world.devices, kept)
    kept[variables.DEVICE] = plan.world.device
    # torchrun would set the variable with a warning; measured times depend on its value.
    kept.setdefault("OMP_NUM_THREADS", "1")
    if plan.world.device == DeviceKind.CPU and plan.compares_bits:
        kept = pinned_cpu_kernels() | kept
    if capability := kept.get("ATEN_CPU_CAPABILITY"):
        # Inductor finds kernels for another instruction set in its cache, and they compute garbage.
        own = f"-{capability}"
        folder = kept.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
        kept["TORCHINDUCTOR_CACHE_DIR"] = folder.removesuffix(own) + own
    if kept.get("PYTHONDONTWRITEBYTECODE") and not _has_bytecode("torch"):
        # As in many images: each rank would compile torch, for seconds.
        kept.setdefault("PYTHONPYCACHEPREFIX", str(cache_folder(kept) / "bytecode"))
        del kept["PYTHONDONTWRITEBYTECODE"]
    if plan.record is not None and plan.record.deterministic:
        # Without it, torch refuses matrix products under deterministic algorithms on NVIDIA GPUs.
        kept.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if plan.world.backend == Backend.NCCL:
        kept |= _flight_recorder(plan, kept)
        if plan.times_collectives:  # NCCL records two events for each
            kept.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    else:
        # gloo records when each rank arrives at its collectives, which identifies the straggler.
        kept.setdefault("TORCH_FR_BUFFER_SIZE", _FLIGHT_RECORDS)
    kept = with_own_code(kept) if plan.reference is None else plan.reference.environment(kept)
    if plan.starts_ranks:
        kept["PATH"] = _search_path(python_command(plan)[0], kept)
        # Each program of the command imports sitecustomize from there, and the ranks among them report.
        kept["PYTHONPATH"] = ":".join(filter(None, [str(STARTUP), kept.get("PYTHONPATH")]))
        kept[variables.RUN_DIR] = str(plan.run_dir)
    return kept


def _has_bytecode(package: str) -> bool:
    """Return whether a package, which is not imported, was compiled when it was installed."""
    spec = importlib.util.find_spec(package)
    return spec is None or spec.origin is None or Path(spec.origin).with_name("__pycache__").exists()


def with_own_code(environ: dict[str, str]) -> dict[str, str]:
    """Return ``environ`` changed so that programs import the same pytest-aorta as pytest, installed or not."""
    package_parent = PACKAGE_ROOT.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = ":".join(filter(None, [str(package_parent), environ.get("PYTHONPATH")]))
    return environ


def _flight_recorder(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables, under torch's old and new names, that record NCCL's collectives and dump them on a timeout."""
    size = environ.get("TORCH_FR_BUFFER_SIZE") or environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or _FLIGHT_RECORDS
    prefix = str(names.flight_prefix(plan.run_dir))
    return {
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }


class ForkedGuard:
    """The guard of a warm launch, held by a pidfd: it is not pytest's child, so its process id could be reused."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def wait(self, timeout: float | None = None) -> None:
        """Return when the guard has exited, as ``subprocess.Popen.wait`` does."""
        if not is_readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("guard", timeout or 0.0)
        os.close(self._pidfd)

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


# Starts a plan's guard, given the environment and the guard's ends of the lifeline pipe and the verdict pipe.
GuardStarter: TypeAlias = Callable[[LaunchPlan, Mapping[str, str], int, int], "subprocess.Popen[bytes] | ForkedGuard"]


def launch(
    plan: LaunchPlan,
    environ: Mapping[str, str] = os.environ,
    start: GuardStarter | None = None,
    launcher: str = LauncherKind.TORCHRUN,
) -> LaunchOutcome:
    """Run ``plan`` and wait until every process of the launch is gone, even when interrupted.

    Args:
        plan: The launch.
        environ: The environment from which the launch's environment is made.
        start: How the guard is started; None starts the guard of a torchrun launch on this host.
        launcher: The launcher that the outcome names.

    Raises:
        LaunchError: The run folder can't be written, or the guard can't be started.
    """
    with GuardedLaunch(plan, environ, start) as running:
        running.wait()
    return keep_outcome(plan, running.outcome().replace(launcher=launcher))


def keep_outcome(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchOutcome:
    """Write an outcome into the run folder, and return it."""
    with suppress(OSError):  # the verdict is here; a disk that has filled up since must not hide it
        write_json(plan.run_dir / names.OUTCOME_FILE, to_builtins(outcome))
    return outcome


def launch_by(program: Sequence[str], plan: LaunchPlan, launcher: str) -> LaunchOutcome:
    """Run ``plan`` with ranks that a program starts in torchrun's place, and wait until no process is left.

    The program starts :func:`rank_command` once for each rank, with the variables ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` that torchrun sets, waits for the ranks,
    and exits with another code than 0 if one has failed. The limits of every launch apply to it and its ranks.

    Args:
        program: Words of the program's command line.
        plan: The launch.
        launcher: The launcher that results and baselines name.

    Raises:
        LaunchError: The run folder can't be written, or the program can't be started.
    """
    return launch(plan, start=partial(start_guard, program=program), launcher=launcher)


class GuardedLaunch:
    """A launch that is running. Leaving the context ends the processes that still run.

    Raises:
        LaunchError: The run folder can't be written, or the guard can't be started.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], start: GuardStarter | None = None) -> None:
        self._plan = plan
        self._verdict = b""
        self._has_ended = False
        self._lost: LaunchOutcome | None = None
        self._problem = ""
        with raised_as(LaunchError, f"results folder {plan.run_dir} can't be written: "):
            prepare_folder(plan)
        with ExitStack() as pipes:
            lifeline_end, self._lifeline = _pipe(pipes)
            self._pipe, verdict_end = _pipe(pipes)
            with raised_as(LaunchError, f"the guard can't be started in {plan.cwd}: "):
                self._guard = (start or start_guard)(plan, environ, lifeline_end.fileno(), verdict_end.fileno())
            lifeline_end.close()
            verdict_end.close()
            limit_s = plan.timeout_s + STOP_S
            if plan.world.nodes > 1 and plan.node is None:
                # The nodes get the time of a launch to arrive, and then each node's guard has its own limit.
                limit_s += plan.timeout_s + NODES_END_S
            self._deadline_s = time.monotonic() + limit_s
            self._pipes = pipes.pop_all()

    def __enter__(self) -> GuardedLaunch:
        """Return the launch itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ask a running guard to end every process, and wait for its exit; end processes that a lost guard has left."""
        with self._pipes:
            self._lifeline.close()
            try:
                self._guard.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
                self._problem = f"the guard did not end within {STOP_S:g} s, and was then killed"
            # The keeper of a lost guard holds the pipe open until it has ended the guard's orphans.
            while not self._has_ended and is_readable(self._pipe, KEEPER_S):
                self.has_ended()
        reported = self.outcome()
        if reported.reason == EndReason.GUARD_LOST:
            self._lost = reported.replace(survivors=_survivors(self._plan), detail=self._problem or reported.detail)
        if self.outcome().survivors:
            for fd in self._plan.lease_fds:
                os.dup(fd)  # the devices stay leased until this process ends
        else:
            _clear_scratch(self._plan.run_dir)

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`has_ended` does not block."""
        return self._pipe.fileno()

    def has_ended(self) -> bool:
        """Wait for the guard's exit or for bytes of its verdict, read them, and return whether the guard has exited."""
        chunk = os.read(self._pipe.fileno(), 65536)
        self._verdict += chunk
        self._has_ended = self._has_ended or not chunk
        return self._has_ended

    def wait(self) -> None:
        """Return when the guard has ended or its time limit is over."""
        while not self._has_ended and is_readable(self._pipe, self._deadline_s - time.monotonic()):
            self.has_ended()

    def stop(self) -> None:
        """Ask the guard to have the ranks write their stacks, and to end the ranks; the verdict follows as usual."""
        with suppress(BrokenPipeError):
            os.write(self._lifeline.fileno(), b".")

    def outcome(self) -> LaunchOutcome:
        """Return the outcome that the guard reported; without a report, the outcome that pytest found."""
        return self._lost or _outcome(self._verdict)


def _survivors(plan: LaunchPlan) -> tuple[int, ...]:
    """Return the ranks of this host, by process id, that outlive a lost guard and its keeper for ``LEFT_S``."""
    deadline_s = time.monotonic() + LEFT_S
    folders = names.rank_folders(plan.run_dir, plan.ranks_of(plan.node or 0))
    while left := [folder for folder in folders if state_of(folder) not in (None, *ENDED)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    pids = names.rank_pids(plan.run_dir)
    return tuple(pids[int(folder.name)] for folder in left)


def prepare_folder(plan: LaunchPlan) -> None:
    """Create the run folder with one folder per rank, and write the plan.

    Over several nodes each node has a run folder of its own, to which the folders of its ranks are links.
    """
    if plan.node is None:
        (plan.run_dir / names.RANKS_FOLDER).mkdir(parents=True)
        if plan.world.backend == Backend.NCCL:
            (plan.run_dir / names.FLIGHT_FOLDER).mkdir()
        if plan.world.nodes > 1:
            _prepare_nodes(plan)
        else:
            for folder in names.rank_folders(plan.run_dir, plan.world.ranks):
                folder.mkdir()
    write_json(plan.run_dir / names.PLAN_FILE, to_builtins(plan), durable=False)


def _prepare_nodes(plan: LaunchPlan) -> None:
    # The plan names programs, which nobody else may change.
    plan.run_dir.chmod(0o700)
    back = Path("..")
    for node in range(plan.world.nodes):
        folder = names.node_folder(plan.run_dir, node)
        for rank in plan.ranks_of(node):
            names.rank_folder(folder, rank).mkdir(parents=True)
            names.rank_folder(plan.run_dir, rank).symlink_to(names.rank_folder(names.node_folder(back, node), rank))
        if plan.world.backend == Backend.NCCL:
            (folder / names.FLIGHT_FOLDER).symlink_to(back / back / names.FLIGHT_FOLDER)


def _clear_scratch(run_dir: Path) -> None:
    """Delete torchrun's folder, and unfinished files of ranks that were killed; call this when all ranks are dead."""
    shutil.rmtree(run_dir / names.ELASTIC_FOLDER, ignore_errors=True)
    for folder in (run_dir, *(run_dir / names.RANKS_FOLDER).glob("*")):
        remove_scratch(folder)


def guard_spec(plan: LaunchPlan, lifeline_fd: int, verdict_fd: int) -> dict[str, Any]:
    """Return the argument of the guard's program."""
    return {
        "argv": agent_command(plan),
        "run_dir": str(plan.run_dir),
        "num_ranks": len(plan.world.ranks),
        "num_local_ranks": plan.world.ranks_per_node,
        "time_limit_s": plan.timeout_s,
        **to_builtins(plan.limits),
        "lifeline_fd": lifeline_fd,
        "verdict_fd": verdict_fd,
        "leave_s": 0.0,
    }


def start_guard(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    lifeline_fd: int,
    verdict_fd: int,
    program: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start the guard, which starts ``program``, by default the torchrun agent."""
    spec = guard_spec(plan, lifeline_fd, verdict_fd) | ({"argv": [*program]} if program else {})
    return start_watcher(plan, spec, launch_environment(plan, environ))


def start_watcher(plan: LaunchPlan, spec: Mapping[str, Any], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the guard's program, which inherits its ends of the pipes and the launch's leases."""
    command = [sys.executable, "-I", "-S", str(GUARD), json.dumps(spec)]
    fds = (spec["lifeline_fd"], spec["verdict_fd"], *plan.lease_fds)
    with (plan.run_dir / names.AGENT_LOG).open("wb") as log:
        return start_apart(command, log, environ, plan.folder, fds)


def _outcome(verdict: bytes) -> LaunchOutcome:
    """Return the guard's verdict, or that the guard was lost."""
    try:
        return decode(verdict, LaunchOutcome, "verdict of the guard")
    except UnreadableFile as error:
        return LaunchOutcome(EndReason.GUARD_LOST, None, (), (), 0.0, detail=str(error) if verdict else "")


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = (
        stack.enter_context(_no_standard_stream(fd, mode)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
    )
    return reader, writer


def _no_standard_stream(fd: int, mode: str) -> IO[bytes]:
    # If pytest's stdin is closed, a pipe can get number 0, which the guard's own stdin would replace.
    if fd <= 2:
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    return os.fdopen(fd, mode, buffering=0)
