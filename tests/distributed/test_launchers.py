"""A launcher that a plugin adds: ranks are started by a program of its own, one process for each."""

CONFTEST = """
import sys
from pytest_aorta.launch.guarded import launch_by, rank_command

class Spawner:
    def launch(self, plan):
        return launch_by([sys.executable, "spawn.py", str(plan.world.size), *rank_command(plan)], plan, "spawner")

    def close(self):
        print("closed the spawner")

def pytest_aorta_make_launcher(config, kind):
    return Spawner() if kind == "torchrun" else None
"""

SPAWN = """
import os, socket, subprocess, sys
size, command = int(sys.argv[1]), sys.argv[2:]
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
ranks = [
    subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(size)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""

TRAIN = """
import os
import torch
if os.environ["RANK"] == "1":
    raise KeyError("lost")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""

TEST = """
import pytest
from pytest_aorta import LaunchError

@pytest.mark.world(size=1)
def test_costs(workload):
    result = workload.run_script("train.py")
    assert result.launcher == "spawner"
    workload.check(result)

@pytest.mark.world(size=2)
def test_failing_rank(distributed_world):
    with pytest.raises(LaunchError, match="rank 1 .*KeyError: 'lost'") as caught:
        distributed_world.run_script("train.py")
    assert caught.value.rank == 1
"""


def test_ranks_started_by_another_program_are_compared_and_diagnosed(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_own=TEST, spawn=SPAWN, train=TRAIN)
    record = ("--aorta-gpus=0", "--update-baselines", "--aorta-launches=1", "-k", "costs")
    pytester.runpytest_subprocess(*record).assert_outcomes(passed=1, deselected=1)
    compared = pytester.runpytest_subprocess("--aorta-gpus=0", "-s", "-v")
    compared.stdout.fnmatch_lines(["*pass *flops *", "*2 passed*", "closed the spawner"])
