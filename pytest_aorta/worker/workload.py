"""The contract of a workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.telemetry import Telemetry


class Workload(ABC):
    """A distributed program that a test can launch; one instance lives in each rank.

    The lifecycle is ``setup()``, ``run()``, ``cleanup()``. ``torch.distributed`` is the workload's own:
    ``setup()`` joins the process group and ``cleanup()`` leaves it. When ``setup()`` or ``run()`` raises, the
    process ends without ``cleanup()``, since collectives of a broken world can hang.

    Attributes:
        launch_mode: how ranks are started; ``torchrun`` is the only mode.
        min_world_size: the fewest ranks the workload makes sense on.
        config: the values of ``default.yaml`` with the test's own on top, checked before the launch.
    """

    launch_mode: ClassVar[str] = "torchrun"
    min_world_size: ClassVar[int] = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    @abstractmethod
    def setup(self) -> None:
        """Join the process group and allocate; raise RuntimeError on fewer than ``min_world_size`` ranks."""

    @abstractmethod
    def run(self) -> RankResult:
        """Warm up, run the measured loop and return this rank's facts."""

    def telemetry(self) -> Telemetry:
        """What :meth:`run` knows of single measured steps beside the result, for the rank's ``telemetry.jsonl``."""
        return Telemetry()

    @abstractmethod
    def cleanup(self) -> None:
        """Leave the process group and free what ``setup()`` took."""
