"""Node agents that wait for launches, as on a cluster that starts them before pytest."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.launch.guarded import launch
from pytest_aorta.launch.nodes.handover import start_coordinator
from pytest_aorta.plan.launch_plan import LaunchPlan, NodeGroup
from pytest_aorta.plan.workload.declaration import find_workload, resolve_config
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis.launch import launch_failure
from pytest_aorta.result.folder import steps_entered
from pytest_aorta.result.reading import collect_result

WORKLOADS = Path(__file__).parent / "workloads"
# Upper limit of the time to start two ranks on busy cores.
UNDER_WAY_S = 120.0


@pytest.fixture
def port() -> int:
    """A free port below those that the kernel gives to other sockets, since it is bound for each launch anew."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    for number in range(lowest - 1, 1024, -1):
        with suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    pytest.skip("every port below the kernel's range is taken")


def make_plan(folder: Path, port: int, name: str, **config: object) -> LaunchPlan:
    spec = find_workload(name, [WORKLOADS])
    return LaunchPlan(
        name=name,
        spec=spec,
        config=resolve_config(spec, config),
        script=None,
        args=(),
        world=World(2, "cpu", nodes=2),
        timeout_s=UNDER_WAY_S + 30,
        run_dir=folder / name,
        cwd=folder,
        group=NodeGroup(2, (), "127.0.0.1", port, UNDER_WAY_S),
    )


def terminate_in_mid_run(agent: subprocess.Popen[str], run_dir: Path) -> None:
    deadline_s = time.monotonic() + UNDER_WAY_S
    while not all(steps_entered(run_dir / f"ranks/{rank}") > 3 for rank in (0, 1)):
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.05)
    agent.terminate()


@pytest.mark.extended
@pytest.mark.long
def test_waiting_agent_takes_part_in_one_launch_after_the_other(tmp_path, port):
    # The other node has its own leases.
    environ = dict(os.environ) | {variables.AGENT_TOKEN: "secret", "AORTA_LEASE_DIR": str(tmp_path / "leases")}
    environ["TMPDIR"] = str(tmp_path)
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "pytest_aorta.cli", "agent", "--wait", "--connect", f"127.0.0.1:{port}"]
    with (tmp_path / "agent.log").open("w+") as log:
        agent = subprocess.Popen([*command, "--node-rank=1"], env=environ, stdout=log, stderr=log)
        try:
            plan = make_plan(tmp_path, port, "fsdp", steps=3, warmup=1, verify=1)
            outcome = launch(plan, environ, start_coordinator)
            assert launch_failure(plan, outcome) is None, (tmp_path / "agent.log").read_text(encoding="utf-8")
            assert len(collect_result(plan, outcome).rank_step_times_ms) == 2

            plan = make_plan(tmp_path, port, "faulty", kind="exception")
            failure = launch_failure(plan, launch(plan, environ, start_coordinator))
            assert failure is not None
            assert (failure.kind, failure.rank) == ("rank exception", 1), failure.text
            assert (
                "faulty on 2 cpu ranks of 2 nodes: rank exception: rank 1 failed first: ValueError: boom"
                in failure.text
            )
            assert agent.poll() is None

            # A cluster ends a node's programs this way, in mid-run.
            plan = make_plan(tmp_path, port, "fsdp", steps=1000000, warmup=1, verify=1)
            plan = replace(plan, run_dir=tmp_path / "ended")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(terminate_in_mid_run, agent, plan.run_dir)
                failure = launch_failure(plan, launch(plan, environ, start_coordinator))
            assert failure is not None
            assert failure.kind == "node lost", failure.text
            said = r"node 1 \(.*\) was lost after .* s: its agent was sent SIGTERM; it ran rank (\d)\n"
            match = re.search(said, failure.text)
            assert match, failure.text
            # The agent has sent the rank's stacks, and no file is left on the node.
            assert (plan.run_dir / f"ranks/{match[1]}/stacks.txt").read_text(encoding="utf-8")
            assert agent.wait(60) == -signal.SIGTERM
            assert list(tmp_path.glob("aorta-node-*")) == []
        finally:
            agent.kill()
            agent.wait()
