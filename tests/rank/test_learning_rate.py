"""Schedules of the learning rate, beside those of torch."""

import pytest
import torch
from aorta_workloads.common.learning_rate import LearningRate, LearningRateSchedule

LR = 0.5


def rates(num_steps: int, first: int = 0, **block) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    learning_rate = LearningRate(LR, LearningRateSchedule(**block), first, first + num_steps)
    found = []
    for _ in range(num_steps):
        learning_rate.apply(optimizer)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def of_torch(num_steps: int, scheduler_of) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = scheduler_of(optimizer)
    found = []
    for _ in range(num_steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_constant_rate_is_lr_to_the_bit():
    assert rates(4) == [LR] * 4


@pytest.mark.parametrize(
    ("kind", "scheduler", "given"),
    [
        ("cosine", torch.optim.lr_scheduler.CosineAnnealingLR, (10, 0.2 * LR)),
        ("linear", torch.optim.lr_scheduler.LinearLR, (1.0, 0.2, 10)),
    ],
)
def test_decay_is_that_of_torch(kind, scheduler, given):
    expected = of_torch(10, lambda optimizer: scheduler(optimizer, *given))
    assert rates(10, kind=kind, min_factor=0.2) == pytest.approx(expected)


def test_warmup_reaches_lr_in_its_last_step():
    assert rates(6, kind="linear", warmup=4, steps=8)[:5] == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR, LR])
    assert rates(3, warmup=2) == [LR / 2, LR, LR]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_steps_after_the_decay_keep_the_smallest_rate(kind):
    assert rates(8, kind=kind, steps=4, min_factor=0.25)[4:] == [LR / 4] * 4


def test_resumed_launch_continues_the_schedule():
    block = {"kind": "cosine", "warmup": 2, "steps": 12}
    assert rates(5, **block) + rates(5, first=5, **block) == rates(10, **block)


def test_warmup_without_a_step_of_decay_is_refused():
    with pytest.raises(ValueError, match=r"lr_schedule.steps is 3 and lr_schedule.warmup is 3: "):
        LearningRateSchedule("linear", warmup=3, steps=3).check()
