"""Faults that are planted into the steps of one CPU rank, which the process of the test must not keep."""

from pathlib import Path

from tests.unit.builders import run_python

LOSING = """
import os, sys, torch
from pathlib import Path
from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.worker.plants import plant

os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
plant(Planted(Plant.LOST_GRADIENT, 0.0, Path(sys.argv[1])))
net = torch.nn.Linear(2, 2)
for parameter in net.parameters():
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
for number in range(6):
    net.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    if not net.bias.grad.any():
        print(number)
"""


def test_gradients_are_lost_in_the_second_step_of_optimizers_within_backward(tmp_path: Path) -> None:
    ended = run_python("-c", LOSING, str(tmp_path / "planted"), check=True)
    assert ended.stdout.split() == ["1"]
    assert (tmp_path / "planted").exists()
