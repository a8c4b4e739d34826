"""The faults that ``aorta selftest`` plants into the launches of a test."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import parse_json, raised_as
from pytest_aorta.common.model import Model, convert, to_json


class Plant(StrEnum):
    """A fault, by the name that is printed."""

    SLOW_RANK = "slow rank"
    IN_LINE = "communication in line"
    BIT = "bit of a gradient"
    LOST_GRADIENT = "gradient lost"
    NAN = "NaN"
    SUMMED = "gradients summed over ranks"
    RATE = "learning rate times ranks"
    SAME_SAMPLES = "same samples on all ranks"
    HANG = "hang"
    EXIT_CODE = "exit code"
    MEMORY = "memory"


class Planted(Model, frozen=True):
    """A fault to plant into each launch.

    Attributes:
        plant: The fault.
        size: Milliseconds to sleep or bytes to hold, for a fault that has a size.
        mark: File that a rank writes once it has planted the fault.
    """

    plant: Plant
    size: float
    mark: Path

    def environ(self) -> dict[str, str]:
        """Return the variable that carries this to the ranks."""
        return {variables.PLANT: to_json(self)}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Planted | None:
        """Return what the variable carries; None without it.

        Raises:
            SpecError: The variable was not set by ``aorta selftest``.
        """
        if not (text := environ.get(variables.PLANT)):
            return None
        name = f"variable {variables.PLANT}"
        with raised_as(SpecError, after="; `aorta selftest` sets it; unset it"):
            return convert(parse_json(text, name), cls, name)
