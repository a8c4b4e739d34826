"""Overlap that is lost turns a test red by `overlap_ratio`; the text says which collective is exposed, and where."""

from __future__ import annotations

import pytest

INNER = """
import pytest

# Compute enough to hide a collective that gloo's threads share two cores with.
SIZE = dict(workload="fsdp", steps=5, warmup=1, verify=0, gemm_size=512, fsdp_shard_size=131072, profile_steps=4)

pytestmark = [pytest.mark.world(size=2, device="cpu"), pytest.mark.tolerance(overlap_ratio="10 points")]

def test_lost(workload):
    workload.compare(dict(SIZE, comm_stream=False), dict(SIZE, comm_stream=True), metrics=["overlap_ratio"])
"""


@pytest.mark.alone
def test_collectives_in_line_are_caught_with_the_reason_on_cpu_ranks(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(test_inner=INNER)
    pytester.makeini("[pytest]\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--aorta-launcher=forkserver")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines_random(
        [
            r"E +overlap_ratio: regression: 0, baseline 0\.[3-9]\d*, change -\d\d\.\d points \[.*\], "
            r"tolerance 10 points, \d launches "
            r"\((all_gather|reduce_scatter) exposed [\d.]+ ms a step, was [\d.]+; rank [01] worst\)"
        ]
    )
