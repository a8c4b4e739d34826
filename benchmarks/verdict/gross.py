"""Alarms of the default comparison of CPU ranks' speed among launches of unchanged code, and planted changes it finds.

Run: python -m benchmarks.verdict.gross [--draws 3000] [--seed 1]
The recorded launches are 338 of eight programs on 2 shared cores, in stretches of which every second one ran beside a
process that keeps a core busy (``RECORD_STRETCH=14`` of unchanged.py). Each draw takes the baseline from one stretch of
a program and five candidates from any stretch of the same program, so that the machine may have become busy.
"""

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.verdict.unchanged import MAX_LAUNCHES, stretches
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.rounds import settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.noise import median_step_ms
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

DATA = Path(__file__).parent / "data" / "gross-cpu-x2.jsonl.gz"
# Upper 95% limits of the mean of a Poisson distribution of which so many were seen (Garwood, Biometrika 28, 1936).
LIMITS = (3.0, 4.74, 6.30, 7.75, 9.15, 10.51)
METRICS = ("step_time_p10", "late_rank_ms")
# Returns a launch with a planted change, given the recorded step in ms.
Change = Callable[[LaunchFacts, float], LaunchFacts]


def slower(factor: float) -> Change:
    """Return a change of all step times."""
    return lambda one, _: one.replace(step_time_ms={name: factor * ms for name, ms in one.step_time_ms.items()})


def late(fraction: float) -> Change:
    """Return a sleep of rank 0 by a fraction of the recorded step."""
    return lambda one, step_ms: one.replace(
        late_ms=[ms + fraction * step_ms * (rank == 0) for rank, ms in enumerate(one.late_ms)]
    )


PLANTED: dict[str, Change] = {
    "nothing": lambda one, _: one,
    "all ranks 3 times as slow": slower(3),
    "all ranks 5 times as slow": slower(5),
    "one rank sleeps 50% of a step": late(0.5),
}


def rows(stored: Sequence[LaunchFacts], candidates: Sequence[LaunchFacts]) -> tuple[Verdict, ...]:
    """Return the verdicts of as many candidates as the comparison asks for."""
    baseline = Baseline("case", "case", "cpu", "case", {}, tuple(map(StoredLaunch, stored)))
    comparison = StoredComparison("case", {}, baseline, {}, MAX_LAUNCHES)
    further = iter(candidates[1:])
    return settle(with_baseline(comparison, candidates[0]), lambda _: next(further)).rows


def main() -> None:
    """Print a table of outcomes for each number of recorded launches and each planted change, and the alarm rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    programs: dict[str, list[list[LaunchFacts]]] = defaultdict(list)
    for (program, _, _), launches in stretches(DATA).items():
        # Recorded before waits for a CPU were, without which there are more alarms.
        programs[program].append([one.replace(cpu_wait=0.0) for one in launches])
    rng, num_alarms, num_draws = random.Random(arguments.seed), 0, 0
    print("| recorded | planted | metric | regression | pass | not compared | launches a comparison |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for recorded in (2, 3, 10):
        for planted, change in PLANTED.items():
            draws = arguments.draws if planted == "nothing" else arguments.draws // 10
            found: dict[str, Counter[Outcome]] = {name: Counter() for name in METRICS}
            num_launches = 0
            for known in programs.values():
                for _ in range(draws):
                    stored = rng.sample(rng.choice(known), recorded)
                    candidates, step_ms = rng.sample(rng.choice(known), MAX_LAUNCHES), median_step_ms(stored)
                    verdicts = rows(stored, [change(one, step_ms) for one in candidates])
                    num_launches += max((row.launches for row in verdicts), default=1)
                    for row in verdicts:
                        found[row.metric][row.outcome] += 1
                    if planted == "nothing":
                        num_draws += 1
                        num_alarms += any(row.outcome is Outcome.REGRESSION for row in verdicts)
            for name, outcomes in found.items():
                counts = [outcomes[one] for one in (Outcome.REGRESSION, Outcome.PASS, Outcome.NOT_APPLICABLE)]
                shares = " | ".join(f"{count / max(1, outcomes.total()):.2%}" for count in counts)
                mean = num_launches / (draws * len(programs))
                print(f"| {recorded} | {planted} | `{name}` | {shares} | {mean:.2f} |")
    print(f"\n{num_alarms} false alarms in {num_draws} comparisons: {num_alarms / num_draws:.1e}", end="")
    print(f", below {LIMITS[num_alarms] / num_draws:.1e} with 95% confidence" if num_alarms < len(LIMITS) else "")


if __name__ == "__main__":
    main()
