"""Cost of merging and validating the results of 1,024 ranks of 300 steps; limits are 2 s and 500 MB.

``python -m benchmarks.launch.thousand_ranks [RANKS] [STEPS]`` writes the ranks' files of one launch with
made-up numbers, then processes them as pytest does: read, check, merge, write ``result.json``, condense to facts.
Writing the ranks' files and starting Python are not measured; memory is the process's peak, including all imports. The
work has one thread, so CPU time equals wall time on an idle machine. The best of five runs counts.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_aorta.common.model import to_builtins, write_json_rows
from pytest_aorta.launch.guarded import prepare_folder
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import World
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result

RANKS = 1024
STEPS = 300
RANKS_PER_NODE = 8
REPEATS = 5
LIMIT_S = 2.0
LIMIT_MB = 500.0


def make_plan(run_dir: Path, num_ranks: int) -> LaunchPlan:
    """Return a plan of ``num_ranks`` GPUs, eight per node."""
    devices = tuple(Device(str(number), "NVIDIA H200", f"GPU-{number}") for number in range(RANKS_PER_NODE))
    world = World(num_ranks, "cuda", devices, num_ranks // RANKS_PER_NODE)
    request = ("llama_fsdp2", None, {"size": "8b"}, "train.py", ())
    return LaunchPlan(*request, world=world, timeout_s=600.0, run_dir=run_dir, cwd=run_dir)


def rank_result(rank: int, num_steps: int) -> RankResult:
    """Return one rank's result: logical values are equal on every rank, times differ."""
    own, common = random.Random(rank), random.Random(0)
    return RankResult(
        passed=True,
        failure_count=0,
        configured_iterations=num_steps,
        total_iterations=num_steps,
        step_times_ms=[500 + own.gauss(0, 10) for _ in range(num_steps)],
        elapsed_sec=0.5 * num_steps,
        metrics={"tokens_per_s": own.gauss(8000, 10), "overlap_ratio": own.random(), "peak_memory_bytes": 5e10},
        weight_hashes={str(step): f"{common.getrandbits(128):032x}" for step in range(10, num_steps + 1, 10)},
        loss=[common.random() for _ in range(num_steps)],
        grad_norm=[common.random() for _ in range(num_steps)],
        environment={"torch": "2.13.0", "device": "cuda", "device_name": "NVIDIA H200", "nccl": "2.27.5"},
        collective_ms=[abs(own.gauss(100, 10)) for _ in range(num_steps)],
        memory_bytes=[50_000_000_000 + own.randrange(1 << 20) for _ in range(num_steps // 10)],
    )


def write_ranks(run_dir: Path, num_ranks: int, num_steps: int) -> None:
    """Write the files of all ranks, as ``worker/lifecycle.py`` does."""
    prepare_folder(make_plan(run_dir, num_ranks))
    for rank in range(num_ranks):
        write_json_rows(run_dir / "ranks" / str(rank) / "result.json", to_builtins(rank_result(rank, num_steps)))


def measure(run_dir: Path, num_ranks: int) -> dict[str, float]:
    """Return CPU seconds of each part, wall seconds of both, and the peak of this process's memory in MB."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    result = collect_result(make_plan(run_dir, num_ranks), LaunchOutcome("exit", 0, (), (), 60.0))
    merged_cpu_s = time.process_time()
    assert result.facts
    facts_cpu_s = time.process_time()
    assert len(result.rank_step_times_ms) == num_ranks
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "merge_s": merged_cpu_s - began_cpu_s,
        "facts_s": facts_cpu_s - merged_cpu_s,
        "wall_s": time.perf_counter() - began_s,
        "peak_mb": peak_mb,
    }


def main() -> int:
    """Write the ranks' files and measure in separate processes; return 1 where a limit is exceeded."""
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
        return 0
    num_ranks, num_steps = (int(text) for text in [*sys.argv[1:], *map(str, (RANKS, STEPS)[len(sys.argv) - 1 :])])
    with tempfile.TemporaryDirectory(prefix="aorta-ranks-") as folder:
        run_dir = Path(folder) / "run"
        write_ranks(run_dir, num_ranks, num_steps)
        command = [sys.executable, __file__, "measure", str(run_dir), str(num_ranks)]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(REPEATS)
        ]
    # Other programs on the machine can only make a run slower.
    measured = min(runs, key=lambda run: run["merge_s"])
    print(f"{num_ranks} ranks of {num_steps} steps: merged and checked in {measured['merge_s']:.2f} s of CPU time,")
    print(f"condensed to facts in {measured['facts_s']:.2f} s, {measured['wall_s']:.2f} s together by the clock;")
    print(f"peak {measured['peak_mb']:.0f} MB (limits: {LIMIT_S:g} s to merge and check, {LIMIT_MB:g} MB)")
    return int(measured["merge_s"] > LIMIT_S or measured["peak_mb"] > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
