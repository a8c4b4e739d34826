"""Strangers at the rendezvous of a cold launch: no port that a launch opens runs their code."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_aorta.launch.guarded import launch
from pytest_aorta.launch.nodes import launch_on_nodes
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import World
from pytest_aorta.result.folder import rank_pids
from tests.distributed import TWO_CPU_RANKS
from tests.distributed.processes import START_S, await_true, mentioning
from tests.unit.builders import make_script_plan, write

ATTACKER = Path(__file__).parent / "scripts" / "rendezvous_attacker.py"
# torch's c10d rendezvous reads its state every five seconds.
LOOKS_S = 11.0
WAITS = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""
LISTENING = "0A"
# Starts the node agents on one host; each host has leases of its own.
EACH = 'for rank in 0 1; do AORTA_NODE_RANK=$rank AORTA_LEASE_DIR=$PWD/leases$rank "$@" & done; wait'


def listening_ports(folder: Path) -> set[str]:
    """Return the ports of a launch's processes: launches of other tests must not be attacked."""
    own = set()
    for pid in mentioning(str(folder)):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(FileNotFoundError):
                own.add(str(file.readlink()))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {
        str(int(fields[1].rpartition(":")[2], 16))
        for fields in lines
        if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own
    }


def make_plan(folder: Path, nodes: int) -> LaunchPlan:
    world, launcher = World(2, "cpu", nodes=nodes), ("sh", "-c", EACH, "sh")
    changes = {"args": (str(folder / "done"),), "world": world, "node_launcher": launcher, "cwd": folder}
    return make_script_plan(folder, WAITS, timeout_s=START_S, **changes)


@pytest.mark.parametrize("nodes", [1, 2])
def test_stranger_who_sets_every_key_of_the_stores_runs_no_code(tmp_path, nodes):
    plan = make_plan(tmp_path, nodes)
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    launching = threading.Thread(target=launch_on_nodes if nodes > 1 else launch, args=(plan, environ))
    launching.start()
    try:
        await_true(lambda: len(rank_pids(plan.run_dir)) == plan.world.size)
        command = [sys.executable, str(ATTACKER), str(tmp_path / "entered"), *listening_ports(plan.run_dir)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        time.sleep(LOOKS_S)
    finally:
        (tmp_path / "done").touch()
        launching.join(START_S)
    assert sum(json.loads(ended.stdout).values()) > 0, "the attacker has found no store"
    assert not (tmp_path / "entered").exists()


MEETS = """
import os
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
anyones = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
assert [key for key in anyones.list_keys() if "default_pg" in key] == []
assert Path(os.environ["AORTA_STORE"]).parent.stat().st_mode & 0o077 == 0
dist.barrier()
"""


@pytest.mark.parametrize(
    "marks",
    [
        pytest.param((), marks=TWO_CPU_RANKS, id="warm"),
        pytest.param((), marks=[pytest.mark.world(size=2, device="cpu", warm=False), pytest.mark.extended], id="cold"),
    ],
)
def test_ranks_meet_where_no_other_user_can_join(distributed_world, tmp_path, marks):
    script = tmp_path / "meets.py"
    write(script, MEETS)
    distributed_world.run_script(str(script))
