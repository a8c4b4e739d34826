"""The scales on which values are compared: a change is a difference of places on one of them. Pure.

Times, rates and sizes differ by factors, so that their places are logs. A share of something lies between 0 and 1, and
an exposed time may be 0: neither has a log, and a factor of next to nothing is nothing. A share is compared by points,
an exposed time by what it adds to a step of the baseline.
"""

from __future__ import annotations

import math
import re
from enum import Enum


class Scale(Enum):
    """How much a value changed; the enum's value is what stands behind the number, as a user writes it."""

    RELATIVE = "%"
    POINTS = " points"
    OF_STEP = "% of step"

    @property
    def unit(self) -> str:
        """What stands behind the number."""
        return str(self.value)

    def transform(self, value: object, step_ms: float) -> float | None:
        """Where a value lies, None where it has no place; ``step_ms`` is the baseline's step time."""
        if not isinstance(value, float | int):
            return None
        if self is Scale.RELATIVE:
            return math.log(value) if value > 0 else None
        return value / step_ms if self is Scale.OF_STEP else float(value)

    def from_transformed(self, transformed: float, step_ms: float) -> float:
        """The inverse of :meth:`place`."""
        if self is Scale.RELATIVE:
            return math.exp(transformed)
        return transformed * step_ms if self is Scale.OF_STEP else transformed

    def difference(self, change: float) -> float:
        """How far apart two places are, of which one is changed by ``change``, such as 0.05 for 5%."""
        return difference(change, relative=self is Scale.RELATIVE)

    def change(self, apart: float) -> float:
        """The inverse of :meth:`difference`."""
        return math.expm1(apart) if self is Scale.RELATIVE else apart

    def parse(self, text: object) -> float | None:
        """A change as a user writes it, such as ``"5%"`` or ``"5 points"``; None where it is none."""
        unit = self.unit.strip().replace(" ", r"\s+")
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text) if isinstance(text, str) else None
        return None if match is None else float(match[1]) / 100

    def text(self, change: float) -> str:
        """The inverse of :meth:`parse`."""
        return f"{change * 100:g}{self.unit}"


def difference(change: float, *, relative: bool) -> float:
    """The difference of logs that a relative change makes; a change of any other kind is a difference itself."""
    return math.log1p(change) if relative else change
