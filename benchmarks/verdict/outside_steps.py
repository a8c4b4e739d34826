"""Launches unchanged scripts again and again, and prints how much memory, graphs, transfers and checkpoints vary.

Run: OUTSIDE_LAUNCHES=10 python -m pytest benchmarks/verdict/outside_steps.py -s
Each script runs on 2 CPU ranks, every second half of the launches beside a busy process. Each launch after the first is
compared with the first.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.verdict.costs_repeat import load
from pytest_aorta import WorkloadRunner
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.distributed.test_outside_steps import SCRIPT

LAUNCHES = int(os.environ.get("OUTSIDE_LAUNCHES", "4"))
SCRIPTS = Path(__file__).parents[1] / "scripts/unedited"
NAMES = ("accumulation", "contrastive", "ddp", "decoder", "fsdp1", "fsdp2", "gan", "gpt", "loader", "zero")
COMPARED = ("memory_growth", "resident_growth", "compiled_graphs")
SHOWN = (
    *COMPARED,
    "peak_resident_bytes",
    "compile_s",
    "checkpoint_ms",
    "all_gather_ms",
    "reduce_scatter_ms",
    "all_reduce_ms",
)


@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.launch_timeout(280)
@pytest.mark.parametrize("name", ["planted none", *NAMES])
def test_repeats(workload: WorkloadRunner, tmp_path: Path, name: str) -> None:
    """Launch the same code many times, idle and busy, and print the range of each metric."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    script, args = SCRIPTS / f"{name}.py", []
    if name == "planted none":
        script, args = tmp_path / "script.py", ["none", str(tmp_path / "saved")]
    launches = []
    for busy in (0, 1):
        with load(busy):
            launches += [workload.run_script(script, args).facts for _ in range(LAUNCHES // 2)]
    alarms = [
        row.metric
        for launch in launches[1:]
        for row in PairedComparison("case", {}, version="before").judge([launch], launches[:1]).rows
        if row.metric in COMPARED and row.outcome is Outcome.REGRESSION
    ]
    values = {metric: [METRICS[metric].measure(launch) for launch in launches] for metric in SHOWN}
    ranges = {metric: (min(found), max(found)) for metric, found in values.items() if None not in found}
    print(f"\n{name}: {len(launches)} launches, {launches[0].num_steps} steps, alarms {alarms}, {ranges}")
    assert not alarms
