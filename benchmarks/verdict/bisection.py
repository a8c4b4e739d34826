"""How often `aorta bisect` names the commit of a slowdown, and how many launches it takes, on recorded launches.

Run: python -m benchmarks.verdict.bisection [--trials 100] [--seed 1] [--commits 64] [--percent 2] [--tolerance 1]
Each trial draws a session block of H200s, and then every launch of the search from the launches recorded in that block,
with replacement. The blocks are those of benchmarks/verdict/data and of the stored baselines. A launch of a commit with
the change has its step times multiplied. A further block is simulated: steps of 70 ms on CPU ranks, of which pairs vary
by 2.4%; there the change is of 5% at a tolerance of 2%.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TypeAlias

import numpy as np

from benchmarks.verdict.detection import UNCHANGED, load
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import read_baseline_file
from pytest_aorta.verdict.commit_search import MAX_END_PAIRS, CommitSearch, NextLaunch, Probe, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.noise import blocks, platform_priors

BASELINES = Path("baselines")
METRIC = "step_time_p50"
# Blocks with fewer launches can't represent the noise of a machine.
MIN_LAUNCHES = 3
# In blocks that other jobs disturbed, launches differ by more than this.
DISTURBED = 0.01
Pool: TypeAlias = list[LaunchFacts]


def recorded_blocks() -> dict[str, Pool]:
    """Return the unchanged launches of each block of benchmarks/verdict/data."""
    template = next(iter(stored_blocks().values()))[0]
    pools: dict[str, Pool] = defaultdict(list)
    for launch in load("*h200-x4-*.json.gz"):
        if launch.variant in UNCHANGED:
            times = {**template.step_time_ms, "p50": float(np.quantile(launch.steps, 0.5))}
            pools[launch.block].append(template.replace(step_time_ms=times, num_steps=len(launch.steps)))
    return {name: pool for name, pool in pools.items() if len(pool) >= MIN_LAUNCHES}


def stored_blocks() -> dict[str, Pool]:
    """Return the launches of each block of the stored baselines of H200s."""
    pools: dict[str, Pool] = defaultdict(list)
    for path in sorted(BASELINES.glob("nvidia-h200-*/*.json")):
        baseline = read_baseline_file(path)
        launches = [stored.facts for stored in baseline.launches]
        for launch, block in zip(launches, blocks(launches), strict=True):
            pools[f"{baseline.platform} {baseline.test.rpartition('::')[2]} {block}"].append(launch)
    return {name: pool for name, pool in pools.items() if len(pool) >= MIN_LAUNCHES}


def simulated(rng: np.random.Generator) -> Pool:
    """Return launches with steps of 70 ms, pairs of which vary by 2.4%."""
    template = next(iter(stored_blocks().values()))[0]
    medians = 70 * np.exp(rng.normal(0, 0.024 / math.sqrt(2), 1000))
    return [template.replace(step_time_ms={**template.step_time_ms, "p50": float(p50)}) for p50 in medians]


def deviation(pool: Pool) -> float:
    """Return the standard deviation of the logs of the step times."""
    return stdev(math.log(launch.step_time_ms["p50"]) for launch in pool)


def slower(launch: LaunchFacts, percent: float) -> LaunchFacts:
    """Return the launch with longer steps."""
    times = {name: value * (1 + percent / 100) for name, value in launch.step_time_ms.items()}
    return launch.replace(step_time_ms=times)


@dataclass
class Tally:
    """Counts of trials by outcome, and launches of each."""

    outcomes: Counter[str]
    launches: list[int]

    def row(self) -> str:
        """Return cells of a table."""
        most = np.quantile(self.launches, 0.95)
        names = ("right", "wrong", SearchOutcome.ABSENT.value, SearchOutcome.UNDECIDED.value)
        return " | ".join([*(str(self.outcomes[name]) for name in names), f"{mean(self.launches):.1f}", f"{most:.0f}"])


def search(
    pool: Pool, device: str, planted: int | None, arguments: argparse.Namespace, rng: np.random.Generator
) -> tuple[str, int]:
    """Return the outcome of one search, and its number of launches."""
    commits, percent, tolerance = arguments.commits, arguments.percent, arguments.tolerance
    priors = platform_priors(BASELINES, "nvidia-h200-x4-nccl" if device == "cuda" else "cpu-x2-gloo", device, "")
    marked = {METRIC: Tolerance(tolerance / 100, origin=Origin.MARKER)}
    comparison = PairedComparison("trial", marked, priors, [METRIC], MAX_END_PAIRS, "good")
    searched, launches = CommitSearch(commits, comparison), 0

    def launch(has_change: bool) -> LaunchFacts:
        drawn = pool[int(rng.integers(len(pool)))]
        return slower(drawn, percent) if has_change else drawn

    while isinstance(step := searched.next(), NextLaunch):
        changed, before = (planted is not None and number >= planted for number in (step.commit, step.before or 0))
        searched.add(Probe(step.commit, launch(changed), launch(before), step.before))
        launches += 2
    return _outcome(step, planted), launches


def _outcome(end: SearchEnd, planted: int | None) -> str:
    if end.outcome is not SearchOutcome.FOUND:
        return end.outcome.value
    return "right" if end.suspects == (planted,) else "wrong"


def run(
    pools: Mapping[str, Pool],
    device: str,
    plant: Callable[[], int | None],
    arguments: argparse.Namespace,
    rng: np.random.Generator,
) -> Tally:
    """Search as often as there are trials, each time in a block that is drawn."""
    names: Sequence[str] = sorted(pools)
    tally = Tally(Counter(), [])
    for _ in range(arguments.trials):
        pool = pools[names[int(rng.integers(len(names)))]]
        outcome, launches = search(pool, device, plant(), arguments, rng)
        tally.outcomes[outcome] += 1
        tally.launches.append(launches)
    return tally


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--percent", type=float, default=2.0)
    parser.add_argument("--tolerance", type=float, default=1.0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    everything = {**recorded_blocks(), **stored_blocks()}
    stable = {name: pool for name, pool in everything.items() if deviation(pool) <= DISTURBED}
    disturbed = {name: pool for name, pool in everything.items() if name not in stable}
    print("| blocks | planted | right | wrong | ends do not differ | undecided | launches, mean | 95% |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    on_cpu = argparse.Namespace(**vars(arguments) | {"percent": 5.0, "tolerance": 2.0})
    for text, device, pools, given in (
        (f"{len(stable)} stable", "cuda", stable, arguments),
        (f"{len(disturbed)} disturbed", "cuda", disturbed, arguments),
        ("CPU ranks, simulated", "cpu", {"simulated": simulated(rng)}, on_cpu),
    ):
        planted = run(pools, device, lambda: int(rng.integers(1, arguments.commits + 1)), given, rng)
        print(f"| {text} | +{given.percent:g}% | {planted.row()} |", flush=True)
        unchanged = run(pools, device, lambda: None, given, rng)
        print(f"| {text} | nothing | {unchanged.row()} |", flush=True)


if __name__ == "__main__":
    main()
