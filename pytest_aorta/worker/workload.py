"""The base class of workloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.telemetry import Telemetry


class Workload(ABC):
    """A distributed program that a test can launch; one instance lives in each rank.

    The lifecycle is ``setup()``, ``run()``, ``cleanup()``. The workload owns ``torch.distributed``: ``setup()`` joins
    the process group and ``cleanup()`` leaves it. If ``setup()`` or ``run()`` raises, the process ends without
    ``cleanup()``, since collectives of a broken world can hang.

    Attributes:
        launch_mode: the way ranks are started; ``torchrun`` is the only mode.
        min_world_size: the smallest number of ranks that the workload can run on.
        config: the value of every config key: the default in ``default.yaml``, or the value that a preset or the test
            gives; checked before the launch.
    """

    launch_mode: ClassVar[str] = "torchrun"
    min_world_size: ClassVar[int] = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    @abstractmethod
    def setup(self) -> None:
        """Join the process group and allocate memory.

        Raises:
            RuntimeError, ValueError: There are fewer than ``min_world_size`` ranks, or the config cannot be satisfied.
        """

    @abstractmethod
    def run(self) -> RankResult:
        """Warm up, run the measured loop and return this rank's result."""

    def telemetry(self) -> Telemetry:
        """Return facts of single measured steps for the rank's ``telemetry.jsonl``; none by default."""
        return Telemetry()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the trained parameters, which must be finite at the end of the run.

        By default, these are the parameters of all modules that are attributes of the workload. Override this method
        if the workload keeps parameters elsewhere.
        """
        # A wrapper and the module in it have the same parameters, each of which is returned once.
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for attribute, value in vars(self).items():
            if isinstance(value, torch.nn.Module):
                for name, parameter in value.named_parameters():
                    found.setdefault(id(parameter), (f"{attribute}.{name}", parameter))
        return found.values()

    @abstractmethod
    def cleanup(self) -> None:
        """Leave the process group and free the resources of ``setup()``."""
