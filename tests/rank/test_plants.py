"""Faults that are planted into the steps of one CPU rank."""

from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.worker import plants


def test_gradients_are_lost_in_the_second_step_of_optimizers_within_backward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    hooks = []
    monkeypatch.setattr(
        plants, "register_optimizer_step_pre_hook", lambda hook: hooks.append(register_optimizer_step_pre_hook(hook))
    )
    plants.plant(Planted(Plant.LOST_GRADIENT, 0.0, tmp_path / "planted"))
    net = torch.nn.Linear(2, 2)
    lost: list[int] = []
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for number in range(6):
        net.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        if not net.bias.grad.any():  # type: ignore[union-attr]
            lost.append(number)
    for hook in hooks:
        hook.remove()
    assert lost == [1]
    assert (tmp_path / "planted").exists()
