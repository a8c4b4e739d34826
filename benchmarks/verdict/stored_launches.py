"""Number of launches that unchanged code takes against stored baselines, drawn from the launches that they contain.

Run: python -m benchmarks.verdict.stored_launches [--platform nvidia-h200-x2-nccl] [--draws 200] [--seed 1]
Each revision of a baseline in turn is the stored one. Either one of its launches is left out and then compared (same
block), or the whole revision is compared with the launches of another revision (other block). Further launches are
drawn from the same revision. The column *to the limit* omits the rule that ends launches when no further launch could
decide.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.statistics import decision

BASELINES = Path("baselines")
MAX_LAUNCHES = 5
# With one launch taken out, at least two are left.
_MIN_LAUNCHES = 3
_TO_THE_LIMIT = mock.patch.object(decision.StoredRule, "foreseen", return_value=None)


@dataclass(frozen=True)
class Draw:
    """A stored baseline and the launches to compare with it, in order."""

    blocks: str
    baseline: Baseline
    launches: list[LaunchFacts]


def draws(baseline: Baseline, count: int, rng: random.Random) -> Iterator[Draw]:
    """Yield draws of every kind, ``count`` of each revision."""
    revisions = [list(launches) for launches in baseline.revisions if len(launches) >= _MIN_LAUNCHES]
    for number, launches in enumerate(revisions):
        others = [launch for other in revisions[:number] + revisions[number + 1 :] for launch in other]
        for draw in range(count):
            first = draw % len(launches)
            kept = launches[:first] + launches[first + 1 :]
            further = rng.choices(launches, k=MAX_LAUNCHES - 1)
            yield Draw("same", _of(baseline, kept), [launches[first], *further])
            if others:
                yield Draw("other", _of(baseline, launches), rng.choices(others, k=MAX_LAUNCHES))


def _of(baseline: Baseline, launches: list[LaunchFacts]) -> Baseline:
    return baseline.replace(launches=tuple(StoredLaunch(launch) for launch in launches))


def num_launches(draw: Draw) -> int:
    """Return the number of launches that the comparison takes."""
    baseline = draw.baseline
    comparison = StoredComparison(baseline.case, baseline.config, baseline, {}, MAX_LAUNCHES)
    first, *left = draw.launches
    made = [first]

    def launch(_: Side) -> LaunchFacts:
        made.append(left[len(made) - 1])
        return made[-1]

    settle(with_baseline(comparison, first), launch)
    return len(made)


def main() -> None:
    """Print a table with a row for each test whose draws do not all take one launch, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="nvidia-h200-x2-nccl")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    taken: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for path in sorted((BASELINES / args.platform).glob("*test-overlap-py*.json")):
        baseline = read_baseline_file(path)
        for draw in draws(baseline, args.draws, rng):
            ended = num_launches(draw)
            with _TO_THE_LIMIT:
                full = num_launches(draw)
            for name in (baseline.test.split("::")[-1], "all"):
                row = taken[draw.blocks, name]
                row.update(draws=1, launches=ended, one=ended == 1, full=full, full_one=full == 1)
    print("| block | test | launches | one launch | launches to the limit | one launch to the limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (blocks, name), row in sorted(taken.items()):
        if name == "all" or row["full_one"] < row["draws"]:
            mean, full = row["launches"] / row["draws"], row["full"] / row["draws"]
            one, full_one = row["one"] / row["draws"], row["full_one"] / row["draws"]
            print(f"| {blocks} | {name} | {mean:.2f} | {one:.1%} | {full:.2f} | {full_one:.1%} |")


if __name__ == "__main__":
    main()
