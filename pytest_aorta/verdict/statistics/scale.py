"""The scales on which values are compared. A change is a difference of transformed values. Pure functions.

Times, rates and sizes differ by factors, so they are transformed by the logarithm. Fractions and exposed times can be
zero, so they are compared on linear scales: fractions in points, exposed times as a fraction of the baseline's step
time.
"""

from __future__ import annotations

import math
import re
from enum import Enum


class Scale(Enum):
    """The scale of a change. The enum's value is the unit that a user writes after the number."""

    RELATIVE = "%"
    POINTS = " points"
    OF_STEP = "% of step"

    @property
    def unit(self) -> str:
        """Return the unit that follows the number."""
        return str(self.value)

    def transform(self, value: object, step_ms: float) -> float | None:
        """Return the transformed value, or None if the value can't be transformed.

        ``step_ms`` is the baseline's step time in ms.
        """
        if not isinstance(value, float | int):
            return None
        if self is Scale.RELATIVE:
            return math.log(value) if value > 0 else None
        return value / step_ms if self is Scale.OF_STEP else float(value)

    def from_transformed(self, transformed: float, step_ms: float) -> float:
        """Return the inverse of :meth:`transform`."""
        if self is Scale.RELATIVE:
            return math.exp(transformed)
        return transformed * step_ms if self is Scale.OF_STEP else transformed

    def difference(self, change: float) -> float:
        """Return the difference of transformed values for a change, e.g. 0.05 for 5%."""
        return difference(change, relative=self is Scale.RELATIVE)

    def change(self, difference: float) -> float:
        """Return the inverse of :meth:`difference`."""
        return math.expm1(difference) if self is Scale.RELATIVE else difference

    def parse(self, text: object) -> float | None:
        """Parse a change such as ``"5%"`` or ``"5 points"``; return None for any other text."""
        unit = self.unit.strip().replace(" ", r"\s+")
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text) if isinstance(text, str) else None
        return None if match is None else float(match[1]) / 100

    def text(self, change: float) -> str:
        """Return the inverse of :meth:`parse`."""
        return f"{change * 100:g}{self.unit}"


def difference(change: float, *, relative: bool) -> float:
    """Return the difference of logs for a relative change; any other change is a difference itself."""
    return math.log1p(change) if relative else change
