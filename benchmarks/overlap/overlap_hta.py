"""Compares `overlap_ratio` with Holistic Trace Analysis' `get_comm_comp_overlap`, rank by rank, on the same traces.

On GPUs: python -m benchmarks.overlap.overlap_hta fsdp '{"gemm_size": 4096, "fsdp_shard_size": 8388608}'
With kept traces: python -m benchmarks.overlap.overlap_hta --traces RUN_DIR/ranks/*/trace.json.gz
Needs pytest-aorta[hta]. The exit code is 1 if a rank differs by more than 0.1 points.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.unit.kineto_traces import overlap_with_host, read_trace

# HTA rounds to microseconds by default, which moves the edges of short kernels. overlap_ratio uses nanoseconds.
os.environ.setdefault("HTA_DISABLE_NS_ROUNDING", "1")
ALLOWED_POINTS = 0.1
TEST = """
import pytest

@pytest.mark.world(size="all", device="cuda")
def test_traced(distributed_world):
    assert distributed_world.run({workload!r}, **{config!r}).passed
"""


def main(arguments: Sequence[str]) -> int:
    """Compare all ranks' traces and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="workload to launch on all GPUs for traces")
    parser.add_argument("config", nargs="?", default="{}", help="config of the workload, as JSON")
    parser.add_argument("--traces", nargs="+", type=Path, help="traces to compare, in order of rank")
    given = parser.parse_args(arguments)
    if given.traces:
        return compare(given.traces)
    if not given.workload:
        parser.error("give a workload or --traces")
    with tempfile.TemporaryDirectory() as folder:
        return compare(launch(given.workload, json.loads(given.config), Path(folder)))


def launch(workload: str, config: dict[str, object], folder: Path) -> list[Path]:
    """Launch a workload through pytest, keep its traces, and return one path per rank."""
    (folder / "test_traced.py").write_text(TEST.format(workload=workload, config=config), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--aorta-profiler=torch",
        "--aorta-results=results",
        "test_traced.py",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return sorted(folder.glob("results/**/ranks/*/trace.json.gz"), key=lambda path: int(path.parent.name))


def compare(paths: Sequence[Path]) -> int:
    """Print both figures of each rank; return 1 if a rank differs by more than allowed."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={rank: str(path.resolve()) for rank, path in enumerate(paths)})
    theirs = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    worst = 0.0
    for rank, path in enumerate(paths):
        capture = overlap_with_host(read_trace(path))
        ours = 100 * capture.metrics()["overlap_ratio"]
        worst = max(worst, abs(ours - float(theirs[rank])))
        print(f"rank {rank}: overlap_ratio {ours:.3f} points, HTA {theirs[rank]:.2f}, {len(capture.steps)} steps")
    print(f"largest difference {worst:.3f} points, allowed {ALLOWED_POINTS}")
    return int(worst > ALLOWED_POINTS or not len(paths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
