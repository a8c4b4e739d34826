"""Causes that ``aorta history`` names in planted histories: 20 of each cause, and 20 in which nothing tells one.

Run: python -m benchmarks.verdict.attribution [--histories 20] [--seed 1]
A history has a version a night of four tests, with the noise of H200s, 0.15%. Something changes in one night, by 2 to
6%, and the command reads the files that the program writes, after the nights that confirm a change. In every
second history, an update of cuDNN three nights before changes nothing. A row tells what was planted, and the causes
that the command named. Needs Apache Otava.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_aorta.cli.main import main as aorta
from pytest_aorta.result.system import OWN_VERSION
from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.verdict.attribution import SPEED_CASE, SPEED_METRICS
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, VerdictReference
from tests.unit.builders import make_verdict
from tests.unit.sample_history import make_entry, make_launch, write_history

DEVIATION = 0.0015
NIGHTS, DECOY = 9, 3
TESTS = ("dense", "experts", "ranking", "pipeline")
KNOWN = {"torch": "2.12.1", "cudnn": 91_000, "device": "cuda", "device_name": "NVIDIA H200", "nccl": "2.27.5"}


SYSTEM = {OWN_VERSION: "0.2.0", "driver": "570.86.15", "kernel": "6.8.0"}


@dataclass(frozen=True)
class Plant:
    """What changes in the night ``NIGHTS``.

    Attributes:
        slower: How many of the tests get slower.
        tests: How many tests the history has.
        check: Whether the speed check of the machine gets slower; None: it was never run.
        environment: Facts of the environment after the change.
        facts: Facts of the launches after the change.
        judged: Changes of the last verdict, which fails.
        nights: The nights that confirm the change.
    """

    slower: int = 1
    tests: int = 4
    check: bool | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)
    nights: int = 3


_STORED = VerdictReference(ReferenceKind.BASELINE, "b.json")
# The kinds of plants, in turn.
PLANTS: dict[str, tuple[Plant, ...]] = {
    "machine": (
        Plant(4, check=True),
        Plant(1, check=True),
        Plant(4),
        Plant(2, facts={"block": "b" * 12}),
    ),
    "environment": (
        Plant(1, environment={"torch": "2.13.0"}),
        Plant(4, environment={"nccl": "2.28.3"}),
        Plant(1, check=False, facts={"system": SYSTEM | {"driver": "575.57.08"}}),
        Plant(4, check=True, environment={"device_name": "NVIDIA H100 80GB HBM3"}),
    ),
    "method": (
        Plant(1, facts={"num_steps": 400}),
        Plant(4, facts={"system": SYSTEM | {OWN_VERSION: "0.3.0"}}),
        Plant(0, judged={"tolerance": Tolerance(0.01)}),
        Plant(0, judged={"reference": VerdictReference(ReferenceKind.BASELINE, "b.json", 2)}),
    ),
    "code": (
        Plant(1),
        Plant(1, check=False),
        Plant(4, check=False),
        Plant(0, facts={"metrics": {"num_parameters": 2e9}}, nights=1),
    ),
    "none": (
        Plant(0, check=False),
        Plant(0, environment={"torch": "2.13.0"}),
        Plant(1, tests=1),
        Plant(0, facts={"num_steps": 400}),
    ),
}


def entries(plant: Plant, draws: random.Random) -> Iterator[HistoryEntry]:
    """Yield the comparisons of all nights."""
    slower, by = draws.sample(TESTS[: plant.tests], plant.slower), 1 + draws.uniform(0.02, 0.06)
    exact = draws.choice(TESTS[: plant.tests])

    decoy = {"cudnn": 90_000} if draws.random() < 0.5 else {}

    def time(usual_ms: float, factor: float = 1.0) -> float:
        return draws.gauss(usual_ms, usual_ms * DEVIATION) * factor

    for night in range(NIGHTS + plant.nights):
        is_after = night >= NIGHTS
        usual: dict[str, Any] = {
            "commit": f"{night + 1:040x}",
            "environment": KNOWN | dict(plant.environment if is_after else {}),
        }
        usual |= {"block": "a" * 12, "system": SYSTEM}
        if night < NIGHTS - DECOY:
            usual["environment"] |= decoy
        if plant.check is not None:
            factor = 1.2 if plant.check and is_after else 1.0
            launches = [
                make_launch(
                    {"step_time_p50": time(20), **{name: time(5, factor) for name in SPEED_METRICS}},
                    number=8 * night,
                    **usual,
                )
                for _ in range(3)
            ]
            yield make_entry(8 * night, case=SPEED_CASE, test=SPEED_CASE, launches=tuple(launches), rows=())
        for number, test in enumerate(TESTS[: plant.tests]):
            value = time(10 * (number + 1), by if is_after and test in slower else 1.0)
            facts = dict(plant.facts) if is_after else {}
            of_code = facts.pop("metrics", {})
            counted = {"num_parameters": 1e9} | (of_code if test == exact else {})
            is_failing = bool(plant.judged) and night == NIGHTS + plant.nights - 1 and test == exact
            row = make_verdict(Outcome.PASS, reference=_STORED.replace(revision=1), value=value)
            if is_failing:
                row = make_verdict(Outcome.REGRESSION, reference=row.reference, value=value).replace(**plant.judged)
            yield make_entry(
                8 * night,
                case=f"test_{test}.py::test_step::fsdp",
                test=f"test_{test}.py::test_step",
                launches=(make_launch({"step_time_p50": value, **counted}, number=8 * night, **(usual | facts)),),
                rows=(row,),
                failing=("step_time_p50",) if is_failing else (),
                outcome="failed" if is_failing else "passed",
            )


def named(folder: Path, plant: Plant, draws: random.Random) -> list[str]:
    """Return the causes that ``aorta history`` names for a planted history."""
    write_history(folder, [*entries(plant, draws)])
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        aorta(["history", str(folder)])
    return sorted({*re.findall(r": (machine|environment|method|code): ", out.getvalue())})


def main(find: Callable[[Path, Plant, random.Random], list[str]] = named) -> int:
    """Plant and count; return 1 if fewer than 95% are right, or a cause is named where nothing tells one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draws, right = random.Random(given.seed), Counter[str]()
    print("| planted | named |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for cause, plants in PLANTS.items():
            found = Counter[str]()
            for number in range(given.histories):
                causes = find(Path(folder, f"{cause}-{number}"), plants[number % len(plants)], draws)
                found[" and ".join(causes) or "none"] += 1
            right[cause] = found[cause]
            print(f"| {cause} | {', '.join(f'{name} {count}' for name, count in found.most_common())} |", flush=True)
    told = sum(count for cause, count in right.items() if cause != "none")
    print(f"{told} of {4 * given.histories} right; {given.histories - right['none']} named where nothing tells")
    return 0 if told >= 0.95 * 4 * given.histories and right["none"] == given.histories else 1


if __name__ == "__main__":
    sys.exit(main())
