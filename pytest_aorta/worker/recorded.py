"""Values that a script records itself beside its steps, and the result that is made of both."""

import resource
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pytest_aorta.common.clock import time
from pytest_aorta.result.measurements import FailureDetail, RankResult, TensorHashes
from pytest_aorta.result.trace.profiled_steps import Costs, Profile
from pytest_aorta.worker.costs import compile_s
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.finite import Optimizers
from pytest_aorta.worker.simulation import peak_memory
from pytest_aorta.worker.steps import StepTimer


@dataclass
class Recorded:
    """Values that a script has recorded; those of each step in the order of steps.

    Tensors stay tensors until the end: reading a number from the device would make the step wait.
    """

    loss: list[float | torch.Tensor] = field(default_factory=list)
    grad_norm: list[float | torch.Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    weight_hashes: dict[str, str] = field(default_factory=dict)
    tensor_hashes: dict[str, TensorHashes] = field(default_factory=dict)
    failures: list[FailureDetail] = field(default_factory=list)
    capture: Profile | None = None

    def result(self, steps: RankResult, device: torch.device, costs: Costs) -> RankResult:
        """Return the result of steps with those values that need no step."""
        peak = peak_memory(device)
        outside = {"peak_resident_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        outside |= {"compile_s": seconds} if (seconds := compile_s()) else {}
        return steps.replace(
            passed=not self.failures,
            failure_count=len(self.failures),
            failures=self.failures,
            # There is a peak only where there is device memory.
            metrics=self.metrics if peak is None else {"peak_memory_bytes": peak} | self.metrics,
            environment=environment_facts(device),
            outside=outside,
            costs=costs,
        )

    def timed(self, timer: StepTimer, began_s: float, costs: Costs) -> RankResult:
        """Return the result of the steps of a timer, with all values."""
        return self.result(timer.result(time.perf_counter() - began_s), timer.device, costs).replace(
            weight_hashes=self.weight_hashes,
            tensor_hashes=self.tensor_hashes,
            loss=[float(value) for value in self.loss],
            grad_norm=[float(value) for value in self.grad_norm],
        )


class Steps(Protocol):
    """The steps of this rank: those that its script brackets, or those of its optimizers.

    Attributes:
        unit: Name of a step in messages.
        end_together: Whether all ranks arrive at the end.
        optimizers: The optimizers that have stepped.
    """

    unit: str
    end_together: bool
    optimizers: Optimizers

    @property
    def device(self) -> torch.device:
        """The device of the steps; the CPU before the first step."""

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended."""

    def refuse(self) -> None:
        """Check what the steps have computed; not collective.

        Raises:
            NotFinite: A value of this rank is NaN or infinite; the message names the first step.
        """

    def result(self, recorded: Recorded) -> RankResult:
        """Return the result of the steps, with what the script has recorded.

        Raises:
            RuntimeError: There is no measured step; the message names the cause.
        """
