"""Process groups of a script: each outlives the script, and a default group can be made again."""

import pytest

from benchmarks.launch.hangs import SCRIPTS
from tests.distributed import TWO_CPU_RANKS
from tests.unit.builders import each_of

pytestmark = pytest.mark.launch_timeout(120)
COLD = pytest.mark.world(size=2, device="cpu", warm=False)
DESTROYED = """
import gc
import weakref
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    made = [weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(20):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return made

made = main()
gc.collect()
assert all(group() for group in made), "freed"
"""
MANY = """
import torch.distributed as dist
import weakref

def make():
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    return weakref.ref(group)

import torch
dist.init_process_group("gloo")
groups = [make() for _ in range(30)]
assert groups[-1]() and not groups[0](), [bool(group()) for group in groups]
"""

# Ranks that made different numbers of groups elsewhere, and then meet twice.
ELSEWHERE = """
import os
import torch.distributed as dist

for number in range(int(os.environ["RANK"])):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
for _ in range(2):
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""


def write(folder, text):
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@each_of("script", {"destroyed": DESTROYED, "many": MANY, "elsewhere": ELSEWHERE})
@pytest.mark.parametrize(
    "launcher", [pytest.param("warm", marks=TWO_CPU_RANKS), pytest.param("cold", marks=[COLD, pytest.mark.extended])]
)
def test_group_that_a_script_destroyed_lives_until_the_rank_has_left(distributed_world, tmp_path, script, launcher):
    distributed_world.run_script(write(tmp_path, script), record={})


@COLD
@pytest.mark.extended
def test_group_of_a_command_lives_until_the_rank_has_left(distributed_world, tmp_path):
    command = ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29656"]
    distributed_world.run_command([*command, write(tmp_path, DESTROYED)], record={})


@TWO_CPU_RANKS
@pytest.mark.launch_timeout(30)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_in_which_gloo_can_deadlock_never_hangs(distributed_world, tmp_path, name):
    script = write(tmp_path, SCRIPTS[name])
    for _ in range(6):
        distributed_world.run_script(script, record={})
