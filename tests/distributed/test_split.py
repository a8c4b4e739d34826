"""Causes planted in CPU ranks, and the parts of the longer step to which they are assigned."""

import json
from pathlib import Path

import pytest

from pytest_aorta.result.trace.overlap import Part
from pytest_aorta.verdict.causes import split

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap" / "planted_step.py"
SIZE = {"layers": 2, "size": 384, "products": 1, "shard": 64, "gradient": 64, "steps": 3, "profile_steps": 3}
PLANTED = {"kernel_ms": 300, "straggler_ms": 400, "host_ms": 200}
# CPU ranks share cores with other work; tests of made-up traces check the parts exactly (tests/unit/result/trace). The
# noise is smaller than the difference of any two planted times, so that no part passes for another.
NOISE_MS = 90


@pytest.mark.alone
@pytest.mark.world(size=2, device="cpu", warm=True)
def test_slower_kernel_slow_rank_and_late_host_of_one_launch_are_told_apart(workload):
    usual, changed = (workload.run_script(SCRIPT, [json.dumps(SIZE | planted)]).facts for planted in ({}, PLANTED))
    total_ms = changed.step_time_ms["p50"] - usual.step_time_ms["p50"]
    found = split(total_ms, [changed], [usual])
    assert found.rank == 1
    assert found.parts_ms[Part.COMPUTE] == pytest.approx(300, abs=NOISE_MS)
    assert found.parts_ms[Part.STRAGGLER] == pytest.approx(400, abs=NOISE_MS)
    assert found.parts_ms[Part.IDLE] == pytest.approx(200, abs=NOISE_MS)
    assert found.parts_ms[Part.EXPOSED] + found.rest_ms == pytest.approx(0, abs=180)
