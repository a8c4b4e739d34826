"""The faults that ``aorta selftest`` plants into the launches of a test, and what has to find each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError

# Metrics of which one has to show a fault.
_TIMES = ("step_time_p10", "step_time_p50", "step_time_p99", "step_time_mean", "step_time_tail5")
_OVERLAP = ("overlap_ratio", "exposed_comm_ms")
_NUMBERS = ("weight_hash", "final_loss")


@dataclass(frozen=True)
class Plant:
    """A fault.

    Attributes:
        name: Its name, in the table that is printed.
        about: What the last rank, or every rank, does.
        metrics: Metrics of which one has to be a regression; empty: the launch has to fail.
        failure: Texts of which one may be in the failure instead, or has to be if there are no metrics.
        without: Why it may not have been planted although the ranks have run.
        is_sized: Whether its size depends on the tolerance of the metric that shows it.
    """

    name: str
    about: str
    metrics: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()
    without: str = "no optimizer has stepped twice"
    is_sized: bool = False


SLOW_RANK, IN_LINE, BIT, LOST_GRADIENT, NAN, HANG, EXIT_CODE, MEMORY = PLANTS = (
    Plant("slow rank", "the last rank sleeps in each step, 1.5 times the tolerance", _TIMES, is_sized=True),
    Plant(
        "communication in line", "compute waits for each collective", _OVERLAP,
        without="no collective was called from Python",
    ),
    Plant("bit of a gradient", "one bit of one gradient of the last rank flips in step 2", _NUMBERS, ("replica",)),
    Plant(
        "gradient lost", "the last rank adds nothing to the gradients of step 2", _NUMBERS, ("replica",),
        "torch.autograd.backward was not called in step 2",
    ),
    Plant(
        "NaN", "the last rank's gradients of step 2 are NaN", failure=("NaN or infinite", "is nan"),
        without="torch.autograd.backward was not called in step 2",
    ),
    Plant("hang", "the last rank sleeps in step 2", failure=("hang in", "hang elsewhere")),
    Plant(
        "exit code", "a handler of atexit ends the last rank with code 3", failure=("exit code 3",),
        without="the last rank did not reach its end",
    ),
    Plant(
        "memory", "every rank holds as much as 1.5 times the tolerance, at least 10%", ("peak_memory_bytes",),
        without="there is no device memory", is_sized=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A fault to plant into each launch.

    Attributes:
        plant: The fault.
        size: Milliseconds to sleep or bytes to hold; 0 for a fault without a size.
        mark: File that a rank writes once it has planted the fault.
    """

    plant: Plant
    size: float
    mark: Path

    def environ(self) -> dict[str, str]:
        """Return the variable that carries this to the ranks."""
        document = {"plant": self.plant.name, "size": self.size, "mark": str(self.mark)}
        return {variables.PLANT: json.dumps(document)}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Planted | None:
        """Return what the variable carries; None without it.

        Raises:
            SpecError: The variable was not set by ``aorta selftest``.
        """
        if not (text := environ.get(variables.PLANT)):
            return None
        try:
            document = json.loads(text)
            plant = {plant.name: plant for plant in PLANTS}[document["plant"]]
            return cls(plant, float(document["size"]), Path(document["mark"]))
        except (ValueError, KeyError, TypeError):
            raise SpecError(f"variable {variables.PLANT}: got {text!r}, `aorta selftest` sets it; unset it") from None
