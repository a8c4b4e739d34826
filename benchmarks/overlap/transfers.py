"""Variation between launches of the time in communication kernels, and of the transfers in it without waits.

Run: python -m benchmarks.overlap.transfers RESULTS
RESULTS is a folder of results, e.g. of --aorta-results, with several launches of each workload. Each row is a workload:
the ranges over launches and ranks, per profiled step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.profiled_steps import collective_facts

HEADER = ("workload", "launches", "communication kernels of a rank", "transfers", "`overlap_ratio`")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    launches: dict[str, list[WorkloadResult]] = defaultdict(list)
    for path in sorted(parser.parse_args().results.rglob("result.json")):
        if path.parent.parent.name != "ranks":
            result = read_result(path)
            if any(result.collectives):
                launches[result.workload].append(result)
    for cells in (HEADER, ["---"] * len(HEADER), *(row(name, found) for name, found in launches.items())):
        print(f"| {' | '.join(cells)} |")


def row(name: str, launches: Sequence[WorkloadResult]) -> list[str]:
    """Return the row of one workload."""
    kernels_ms = [
        sum(sum(calls.ms) for calls in rank) / len(steps)
        for launch in launches
        for rank, steps in zip(launch.collectives, launch.overlap, strict=True)
    ]
    transfers_ms = [
        sum(facts.transfer_ms for facts in collective_facts(launch.collectives, len(launch.overlap[0])).values())
        for launch in launches
    ]
    ratios = [fmean(launch.rank_metrics["overlap_ratio"]) for launch in launches]
    ranges = (f"{min(values):.2f} to {max(values):.2f} ms" for values in (kernels_ms, transfers_ms))
    return [f"`{name}`", str(len(launches)), *ranges, f"{min(ratios):.3f} to {max(ratios):.3f}"]


if __name__ == "__main__":
    main()
