"""AdamW whose kernels are compiled trains like torch's, and one continues from the other's checkpoint."""

import copy
from typing import Any

import pytest
import torch
from aorta_workloads.common.adamw import CompiledAdamW
from aorta_workloads.common.gradients import clip_factor
from torch import nn

OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 0.5


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 / step
        model(torch.full((2, 3), float(step))).square().sum().backward()
        if isinstance(optimizer, CompiledAdamW):
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.gradient_factor = clip_factor(MAX_NORM, nn.utils.get_total_norm(gradients))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("continued", [CompiledAdamW, torch.optim.AdamW])
def test_it_trains_like_torch_and_takes_its_state_over(continued: type[torch.optim.AdamW]) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    model = copy.deepcopy(expected)
    train(expected, torch.optim.AdamW(expected.parameters(), **OPTIONS), range(1, 7))

    train(model, first := CompiledAdamW(model.parameters(), **OPTIONS), range(1, 4))
    optimizer = continued(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(first.state_dict())
    train(model, optimizer, range(4, 7))

    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
