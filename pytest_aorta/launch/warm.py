"""Warm launches, from fork servers."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pytest_aorta.common.errors import ColdLaunchWarning, LaunchError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.processes import start_apart
from pytest_aorta.launch.guarded import (
    ForkedGuard,
    guard_spec,
    launch,
    launch_environment,
    python_command,
    require_torch,
)
from pytest_aorta.launch.process.channel import receive, send
from pytest_aorta.plan.device_kind import ACCELERATED
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.result.folder import AGENT_LOG
from pytest_aorta.result.outcome import LaunchOutcome

# Importing torch from a cold network disk takes minutes.
START_S = 300.0
# Forking a process that has imported torch takes milliseconds.
REPLY_S = 30.0
MAX_LAUNCHES = 200
# Each has torch imported, some 300 MB; a search has three versions at a time.
MAX_SERVERS = 3
# Variables that only ranks read, after the fork; every other variable may be read when torch is imported.
_RANKS_OWN_PREFIXES = ("AORTA_", "PYTEST_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_")
_RANKS_OWN = {"CUDA_VISIBLE_DEVICES"}
# Makes torch count devices without initializing CUDA, in case an import asks for the count.
_SERVER_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

Key: TypeAlias = tuple[object, ...]


class _ServerUnfit(Exception):
    """The fork server can't be used; the message gives the reason."""


class ForkServers:
    """The launcher of warm launches, which keeps the fork servers that were used last."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        # In order of their last uses.
        self._servers: dict[Key, ForkServer] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the fork servers."""
        return [server.pid for server in self._servers.values()]

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        """Run ``plan`` warm, or with torchrun and a warning if the fork server is unfit.

        Raises:
            LaunchError: torch is not installed, or as in :func:`pytest_aorta.launch.guarded.launch`.
        """
        if plan.reference is None:
            require_torch()
        try:
            server = self._fit_server(plan)
        except _ServerUnfit as error:
            message = f"{plan.name}: launched with torchrun, since the fork server is unfit: {error}"
            warnings.warn(ColdLaunchWarning(message), stacklevel=2)
            return launch(plan, self._environ)
        return launch(plan, self._environ, server.start_guard, LauncherKind.FORKSERVER)

    def close(self) -> None:
        """End every fork server."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _fit_server(self, plan: LaunchPlan) -> ForkServer:
        key = server_key(plan, self._environ)
        server = self._servers.pop(key, None)
        if server is not None:
            server.limit_s = plan.timeout_s
            if not server.is_fit():
                server.close()
                server = None
        if server is None:
            # Launches of two versions alternate, and a launch must not end the other version's server.
            while len(self._servers) >= MAX_SERVERS:
                self._servers.pop(next(iter(self._servers))).close()
            server = ForkServer(plan, self._environ)
        self._servers[key] = server
        on_gpu = plan.world.device in ACCELERATED
        server.prepare(plan.preload, launch_environment(plan, self._environ) if on_gpu else None)
        return server


class ForkServer:
    """Handle of one fork server's process.

    Attributes:
        limit_s: The time limit of the current launch, within which every request has to be answered.

    Raises:
        _ServerUnfit: The server does not start. Every method raises this error if the server does not answer.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self._num_launches = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._channel, servers_end = socket.socketpair()
        program = [*python_command(plan), "-u", "-m", "pytest_aorta.launch.process.forkserver"]
        own = launch_environment(plan, environ) | _SERVER_ENVIRONMENT
        with raised_as(_ServerUnfit, f"the server can't be started in {plan.cwd}: "), servers_end:
            command = [*program, str(servers_end.fileno()), str(os.getpid())]
            self._process = start_apart(command, self._log, own, plan.cwd, [servers_end.fileno()])
        self.limit_s = plan.timeout_s
        try:
            self._reply(START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def is_fit(self) -> bool:
        """Return whether the server can be used for another launch."""
        if self._num_launches >= MAX_LAUNCHES:
            return False
        try:
            self.prepare()
        except _ServerUnfit:
            return False
        return True

    def prepare(self, modules: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        """Have the server import modules that ranks need, and prove once that a forked child can use CUDA.

        Args:
            modules: Modules that ranks of a workload need.
            environ: Environment of ranks that use CUDA; None on CPU ranks.

        Raises:
            _ServerUnfit: The server must not be forked, or can't import the modules, or a child can't use the device.
        """
        message = {"request": "prepare", "modules": list(modules), "environ": environ and dict(environ)}
        reply, _ = self._ask(message, START_S)
        if problem := reply["problem"]:
            raise _ServerUnfit(problem)

    def start_guard(
        self, plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
    ) -> ForkedGuard:
        """Fork the guard of a launch.

        Raises:
            LaunchError: The server was lost.
        """
        self._num_launches += 1
        message = {
            "request": "launch",
            "spec": guard_spec(plan, lifeline_fd, verdict_fd),
            "environ": launch_environment(plan, environ),
            "folder": str(plan.folder),
        }
        with (plan.run_dir / AGENT_LOG).open("wb") as log:
            try:
                fds = (lifeline_fd, verdict_fd, log.fileno(), *plan.lease_fds)
                _, [pidfd] = self._ask(message, REPLY_S, fds)
            except _ServerUnfit as error:
                self.close()
                raise LaunchError(f"{plan.name}: the fork server was lost: {error}") from None
        return ForkedGuard(pidfd)

    def close(self) -> None:
        """End the server; running launches continue under their own guards."""
        self._channel.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(
        self, message: dict[str, Any], limit_s: float, fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            send(self._channel, message, fds)
            return self._reply(limit_s)
        except OSError as error:
            raise _ServerUnfit(f"the request can't be sent: {error}") from None
        except BaseException:
            # After an interrupt such as Ctrl-C, the answer to this request would be read as the answer to the next.
            self._channel.close()
            raise

    def _reply(self, limit_s: float) -> tuple[dict[str, Any], list[int]]:
        # In a torchrun launch, too, ranks have to import torch within the launch's time limit.
        limit_s = min(limit_s, self.limit_s)
        self._channel.settimeout(limit_s)
        try:
            return receive(self._channel)
        except TimeoutError:
            raise _ServerUnfit(f"no answer within {limit_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise _ServerUnfit(f"{error}; last lines of its log: {self._last_lines()}") from None

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return " ".join(lines[-2:])[:300]


def server_key(plan: LaunchPlan, environ: Mapping[str, str]) -> Key:
    """Return everything that a server's imports depend on: environment, working folder and interpreter."""
    of_imports = tuple(
        (name, value)
        for name, value in sorted(launch_environment(plan, environ).items())
        if name not in _RANKS_OWN and not name.startswith(_RANKS_OWN_PREFIXES)
    )
    return plan.world.device, of_imports, str(plan.cwd), python_command(plan)[0]
