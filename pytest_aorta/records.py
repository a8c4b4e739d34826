"""What a test leaves for the summary: plain data that travels with its report, from xdist's workers too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_aorta.baseline import Baseline
from pytest_aorta.decision import Outcome
from pytest_aorta.verdicts import Verdict


@dataclass(frozen=True)
class LaunchTimes:
    """How long the ``number``-th launch of a test took: ``wall`` and, as far as they are known, its parts."""

    number: int
    launcher: str
    times_s: dict[str, float]


@dataclass
class TestRecord:
    """One test's verdicts, the baselines it wants written, its launches, and whether it lacked devices.

    ``notes`` are what its launches showed besides, ``detection`` what each new baseline can tell, by case.
    """

    __test__ = False

    nodeid: str
    verdicts: list[Verdict] = field(default_factory=list)
    new_baselines: list[Baseline] = field(default_factory=list)
    used_cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    detection: dict[str, list[str]] = field(default_factory=dict)
    lacked_devices: str | None = None
    num_launches: int = 0
    launch_times: list[LaunchTimes] = field(default_factory=list)

    @property
    def is_undecided(self) -> bool:
        """Whether a verdict of it decides nothing."""
        return any(verdict.outcome is Outcome.INCONCLUSIVE for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodeid": self.nodeid,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "new_baselines": [baseline.to_json() for baseline in self.new_baselines],
            "used_cases": self.used_cases,
            "notes": self.notes,
            "detection": self.detection,
            "lacked_devices": self.lacked_devices,
            "num_launches": self.num_launches,
            "launch_times": [asdict(times) for times in self.launch_times],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TestRecord:
        """The inverse of :meth:`to_json`."""
        return cls(
            nodeid=data["nodeid"],
            verdicts=[Verdict.from_json(row) for row in data["verdicts"]],
            new_baselines=[Baseline.from_json(row) for row in data["new_baselines"]],
            used_cases=data["used_cases"],
            notes=data["notes"],
            detection=data["detection"],
            lacked_devices=data["lacked_devices"],
            num_launches=data["num_launches"],
            launch_times=[LaunchTimes(**times) for times in data["launch_times"]],
        )
