"""What a test leaves for the summary: plain data that travels with its report, from xdist's workers too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_aorta.baseline import Baseline
from pytest_aorta.comparison import Verdict


@dataclass
class TestRecord:
    """One test's verdicts, the baselines it wants written, and whether it was skipped for lack of devices."""

    __test__ = False

    nodeid: str
    verdicts: list[Verdict] = field(default_factory=list)
    new_baselines: list[Baseline] = field(default_factory=list)
    used_cases: list[str] = field(default_factory=list)
    lacked_devices: str | None = None
    num_launches: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodeid": self.nodeid,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "new_baselines": [baseline.to_json() for baseline in self.new_baselines],
            "used_cases": self.used_cases,
            "lacked_devices": self.lacked_devices,
            "num_launches": self.num_launches,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TestRecord:
        """The inverse of :meth:`to_json`."""
        return cls(
            nodeid=data["nodeid"],
            verdicts=[Verdict.from_json(row) for row in data["verdicts"]],
            new_baselines=[Baseline.from_json(row) for row in data["new_baselines"]],
            used_cases=data["used_cases"],
            lacked_devices=data["lacked_devices"],
            num_launches=data["num_launches"],
        )
