"""Schedules of the learning rate."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LearningRateSchedule:
    """The block ``lr_schedule`` of a config: a linear warmup, then a decay from ``lr`` to ``min_factor * lr``.

    Attributes:
        kind: ``constant``; ``linear``; or ``cosine``, half a period as in SGDR (Loshchilov and Hutter, 2017) without
            restarts.
        warmup: Training steps of the warmup, the last of which has the rate ``lr``.
        steps: Training steps after which the decay ends; None means all steps of the launch.
        min_factor: Fraction of ``lr`` at the end of the decay.
    """

    kind: str = "constant"
    warmup: int = 0
    steps: int | None = None
    min_factor: float = 0.0

    def check(self) -> None:
        """Raise ValueError if the warmup leaves no step for the decay."""
        if self.kind != "constant" and self.steps is not None and self.steps <= self.warmup:
            raise ValueError(
                f"lr_schedule.steps is {self.steps} and lr_schedule.warmup is {self.warmup}: the decay begins after "
                f"the warmup; allowed is a larger number of steps"
            )

    def factor(self, step: int, num_steps: int) -> float:
        """Return the fraction of ``lr`` in a training step.

        Args:
            step: Number of training steps before this one, those of a loaded checkpoint included.
            num_steps: Training steps of the launch, for a schedule without ``steps``.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        end = num_steps if self.steps is None else self.steps
        progress = min(1.0, (step - self.warmup) / max(1, end - self.warmup))
        remaining = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_factor + (1 - self.min_factor) * remaining


@dataclass
class LearningRate:
    """The learning rate of an optimizer, step by step.

    Attributes:
        lr: The rate that the schedule multiplies.
        schedule: The schedule.
        step: Number of training steps so far.
        num_steps: Training steps of the launch, counted from the first step of a loaded checkpoint.
    """

    lr: float
    schedule: LearningRateSchedule
    step: int
    num_steps: int

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of the next training step."""
        rate = self.rate(self.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        self.step += 1

    def rate(self, step: int) -> float:
        """Return the rate of a training step."""
        return self.lr * self.schedule.factor(step, self.num_steps)
