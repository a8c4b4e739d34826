"""A measured step with its planted fault, whose operators are captured if the config asks for that step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pytest_aorta.worker import OperatorCapture

from .faults import OPERATOR_INPUT, OPERATOR_NAN, OPERATOR_OUTPUT, Fault


class StepCapture:
    """Captures the operators of one step, up to the end of the step and of what a fault changes after it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int | None, fault: Fault, rank: int
    ) -> None:
        """Capture measured step ``step``; None captures none."""
        self._model, self._optimizer, self._step, self._fault, self._rank = model, optimizer, step, fault, rank
        self._capture = None if step is None else OperatorCapture(model)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Plant the fault of a step in its operators, or after them."""
        fault, place = self._fault, {"step": step, "rank": self._rank}
        # The capture is entered between the two, so that it records both faults.
        with fault.flips(OPERATOR_OUTPUT, OPERATOR_NAN, **place):
            if self._capture and step == self._step:
                self._capture.begin(step)
            with fault.flips(OPERATOR_INPUT, **place):
                yield
            fault.after_step(step, self._rank, self._model, self._optimizer)
            if self._capture:
                self._capture.end()
