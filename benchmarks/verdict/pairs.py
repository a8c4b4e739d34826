"""How often an A/B is right on pairs drawn from recorded launches, with planted changes and without.

Run: python -m benchmarks.verdict.pairs [--draws 10000] [--changes 0,2,5,10] [--tolerance 2] [--pairs 12] [--seed 1]
A draw is made of runs of four launches that were recorded one after the other in one block: the first two are a pair,
and the last two in reverse order, as an A/B alternates, so neighboring launches stay as dependent as they were. No run
is drawn twice. In each run, candidate and reference are exchanged with a probability of one half, since the code is the
same. In disturbed
blocks, launches differ by a standard deviation of more than 1% on H200s and 5% on CPU ranks. The prior is that of a
baseline of ten launches of the block.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.verdict.detection import UNCHANGED, load
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import read_baseline_file
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import blocks, default_variance
from pytest_aorta.verdict.statistics.decision import PAIR_LOOKS, Decision, Outcome, decide_pairs
from pytest_aorta.verdict.statistics.variance import Variance, baseline_estimate

METRIC = METRICS["step_time_p50"]
DISTURBED = {"cuda": 0.01, "cpu": 0.05}
MIN_LAUNCHES = 6
# Deviation of simulated launches: pairs differ by 2.4%.
SIMULATED = 0.024 / math.sqrt(2)


def stored_blocks() -> dict[str, list[LaunchFacts]]:
    """Return the launches of each block of the stored baselines of H200s."""
    pools: dict[str, list[LaunchFacts]] = defaultdict(list)
    for path in sorted(Path("baselines").glob("nvidia-h200-*/*.json")):
        baseline = read_baseline_file(path)
        launches = [stored.facts for stored in baseline.launches]
        for launch, block in zip(launches, blocks(launches), strict=True):
            pools[f"{baseline.platform} {baseline.test.rpartition('::')[2]} {block}"].append(launch)
    return pools


def pools(device: str) -> dict[str, np.ndarray]:
    """Return block -> logs of the step times of its unchanged launches, in order."""
    found: dict[str, list[float]] = {}
    for launch in load("cpu-*.json.gz" if device == "cpu" else "*h200-*.json.gz"):
        if launch.variant in UNCHANGED:
            found.setdefault(launch.block, []).append(math.log(np.quantile(launch.steps, 0.5)))
    if device == "cuda":
        found |= {
            name: [math.log(launch.step_time_ms["p50"]) for launch in pool] for name, pool in stored_blocks().items()
        }
    return {name: np.array(pool) for name, pool in found.items() if len(pool) >= MIN_LAUNCHES}


def drawn(pool: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` pairs ``[pair, side]`` of logs."""
    runs = []
    for begin in rng.choice(len(pool), -(-count // 2), replace=len(pool) < count // 2):
        first, second, third, fourth = pool[(begin + np.arange(4)) % len(pool)]
        both = np.array([[first, second], [fourth, third]])
        runs.append(both if rng.random() < 0.5 else both[:, ::-1])
    return np.concatenate(runs)[:count]


def prior(pool: np.ndarray, device: str, rng: np.random.Generator) -> Variance:
    """Return the variance of a baseline of ten launches."""
    stored = rng.choice(pool, 10, replace=len(pool) < 10).tolist()
    return baseline_estimate({"here": stored}, [[stored]], default_variance(METRIC, device)).variance.within


def decided(pairs: np.ndarray, variance: Variance, tolerance: float) -> Decision:
    """Return the decision at the first look that decides."""
    launches = [(float(here), float(there)) for here, there in pairs]
    for look in PAIR_LOOKS:
        decision = decide_pairs(launches[:look], variance, tolerance, max_pairs=len(launches), worse=1)
        if decision.outcome is not None:
            return decision
    raise AssertionError("the last look decides")


def row(
    blocks: Sequence[np.ndarray], device: str, change: float, arguments: argparse.Namespace, rng: np.random.Generator
) -> str:
    """Return cells: flagged, passed, improved and undecided of 10,000 draws, and mean pairs."""
    outcomes: Counter[Outcome | None] = Counter()
    spent = 0
    for _ in range(arguments.draws):
        pool = blocks[rng.integers(len(blocks))] if blocks else rng.normal(0, SIMULATED, 40)
        pairs = drawn(pool, arguments.pairs, rng) if blocks else rng.normal(0, SIMULATED, (arguments.pairs, 2))
        pairs[:, 0] += math.log1p(change / 100)
        found = decided(pairs, prior(pool, device, rng), arguments.tolerance / 100)
        outcomes[found.outcome] += 1
        spent += found.launches
    kinds = (Outcome.REGRESSION, Outcome.IMPROVED, Outcome.PASS, Outcome.INCONCLUSIVE)
    counts = " | ".join(f"{1e4 * outcomes[kind] / arguments.draws:.0f}" for kind in kinds)
    return f"{counts} | {spent / arguments.draws:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--changes", default="0,2,5,10")
    parser.add_argument("--tolerance", type=float, default=2.0)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"of 10,000 A/Bs of at most {arguments.pairs} pairs, T = {arguments.tolerance:g}%\n")
    print("| launches | change | flagged | improved | passed | undecided | pairs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    groups: list[tuple[str, str, list[np.ndarray]]] = [("CPU ranks, simulated, pairs vary by 2.4%", "cpu", [])]
    for device, name in (("cuda", "H200"), ("cpu", "CPU ranks")):
        every = pools(device).values()
        stable = [pool for pool in every if np.std(pool, ddof=1) <= DISTURBED[device]]
        disturbed = [pool for pool in every if np.std(pool, ddof=1) > DISTURBED[device]]
        groups += [(f"{name}, {len(stable)} stable blocks", device, stable)]
        groups += [(f"{name}, {len(disturbed)} disturbed blocks", device, disturbed)]
    for text, device, chosen in groups:
        for change in map(float, arguments.changes.split(",")):
            cells = row(chosen, device, change, arguments, np.random.default_rng(arguments.seed))
            print(f"| {text} | +{change:g}% | {cells} |", flush=True)


if __name__ == "__main__":
    main()
