"""Two causes planted in one launch, and what the split of the regression reports about each.

Run: ROUNDS=5 python -m pytest benchmarks/overlap/split.py -s --aorta-gpus=2
OUT=DIR keeps one line of JSON per round in DIR/split.jsonl, and further runs add rounds until there are ROUNDS of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pytest_aorta import DistributedWorld
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.overlap import Part
from pytest_aorta.verdict.causes import split

ROUNDS = int(os.environ.get("ROUNDS", "3"))
FILE = "split.jsonl"
SCRIPT = Path(__file__).with_name("planted_step.py")
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "layers": 2,
        "size": 128,
        "products": 2,
        "shard": 1 << 14,
        "gradient": 1 << 22,
        "steps": 15,
        "profile_steps": 9,
    },
    "cuda": {
        "layers": 8,
        "size": 4096,
        "products": 8,
        "shard": 1 << 22,
        "gradient": 1 << 25,
        "steps": 40,
        "profile_steps": 3,
    },
}
# Milliseconds of the two causes by device.
PLANTED = {"cpu": (120.0, 80.0), "cuda": (4.0, 3.0)}
# Each scenario: the settings that both launches have, and the two causes. A host that never waits for its device delays
# the device only by the excess of a step's sleep over the device's work.
SCENARIOS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "a delay on one rank, a collective exposed": ({}, ("straggler_ms", "exposed_ms")),
    "a slower kernel, a late host that waits for its device": ({"blocks": True}, ("kernel_ms", "host_ms")),
    "a slower kernel, a late host that never waits": ({}, ("kernel_ms", "host_ms")),
}
LAST = "a slower kernel, a late host that never waits"


@dataclass(frozen=True)
class Round:
    """One pair of launches: the causes planted in the second, and the parts that the split found, in milliseconds."""

    scenario: str
    platform: str
    planted_ms: dict[str, float]
    found_ms: dict[str, float]
    critical_rank: int | None


@pytest.mark.world(size="all", warm=True)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_split(distributed_world: DistributedWorld, scenario: str) -> None:
    """Plant two causes and print each part beside the planted time."""
    if scenario == LAST and distributed_world.device == "cpu":
        pytest.skip("a CPU rank has no device that its host could run ahead of")
    rounds = [one for one in kept() if (one.scenario, one.platform) == (scenario, distributed_world.platform)]
    while len(rounds) < ROUNDS:
        rounds.append(measure(distributed_world, scenario))
        keep(rounds[-1])
    print("", *table(rounds), sep="\n")


def measure(world: DistributedWorld, scenario: str) -> Round:
    """Launch the step unchanged and with both causes."""
    common, (first, second) = SCENARIOS[scenario]
    size, amounts = SIZES[world.device] | common, PLANTED[world.device]
    usual, enqueue_ms = launch(world, size)
    causes = {first: amounts[0], second: amounts[1]}
    if scenario == LAST:
        causes["host_ms"] += usual.step_time_ms["p50"] + causes["kernel_ms"] - enqueue_ms
    changed, _ = launch(world, size | causes)
    total_ms = changed.step_time_ms["p50"] - usual.step_time_ms["p50"]
    print(split(total_ms, [changed], [usual]))
    planted = dict.fromkeys(("compute", "straggler", "exposed_comm", "idle", "rest"), 0.0)
    parts = {"kernel_ms": "compute", "straggler_ms": "straggler", "exposed_ms": "exposed_comm", "host_ms": "idle"}
    planted |= {parts[name]: amount for name, amount in zip((first, second), amounts, strict=True)}
    if "exposed_ms" in causes:
        planted["exposed_comm"] = changed.metrics["planted_exposed_ms"]
    shown = {
        part.value: changed.breakdown_ms[part] - usual.breakdown_ms[part] for part in Part if part is not Part.COPY
    }
    rest = {"rest": total_ms - sum(shown.values())}
    return Round(scenario, world.platform, planted, shown | rest, changed.description.critical_rank)


def launch(world: DistributedWorld, planted: dict[str, Any]) -> tuple[LaunchFacts, float]:
    """Launch the step once; return its facts and the time in which a host enqueues it."""
    result = world.run_script(str(SCRIPT), (json.dumps(planted),))
    return result.facts, max(result.rank_metrics["enqueue_ms"])


def kept() -> list[Round]:
    """Return the rounds in ``OUT``."""
    file = Path(os.environ["OUT"]) / FILE if "OUT" in os.environ else None
    return [] if file is None or not file.exists() else read(file)


def read(file: Path) -> list[Round]:
    """Return the rounds of a file."""
    return [Round(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def keep(one: Round) -> None:
    """Add a round to ``OUT``, if there is one."""
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(one)) + "\n")


def table(rounds: Sequence[Round]) -> Iterable[str]:
    """Return Markdown: each part of a scenario as planted and as found, medians and ranges over its rounds."""
    yield "| planted | part | planted ms | found ms | range | off by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for scenario in dict.fromkeys(one.scenario for one in rounds):
        of_it = [one for one in rounds if one.scenario == scenario]
        for part in of_it[0].planted_ms:
            planted = median(one.planted_ms[part] for one in of_it)
            found = sorted(one.found_ms[part] for one in of_it)
            off = f"{median(found) / planted - 1:+.1%}" if planted else "-"
            yield (
                f"| {scenario} | {part} | {planted:.2f} | {median(found):.2f} | {found[0]:.2f} to {found[-1]:.2f} "
                f"| {off} |"
            )
