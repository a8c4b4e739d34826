"""Lost overlap fails a test by `overlap_ratio`; the failure names the exposed collective and the rank."""

import pytest

from tests.unit.builders import nightly

INNER = """
import pytest

# Enough compute to hide a collective, although gloo's threads share two cores with it.
SIZE = dict(workload="fsdp", steps=2, warmup=1, verify=0, gemm_size=512, fsdp_shard_size=131072, profile_steps=4)

pytestmark = [pytest.mark.world(size=2, device="cpu"), pytest.mark.tolerance(overlap_ratio="10 points")]

TRACED = dict(
    workload="llama_simple_fsdp", steps=5, warmup=2, dim=256, ffn_hidden=768, n_layers=2, seq_len=64, profile_steps=4,
)

def test_in_line(workload):
    workload.compare(dict(SIZE, comm_stream=False), dict(SIZE, comm_stream=True), metrics=["overlap_ratio"])

def test_not_ahead(workload):
    workload.compare(dict(TRACED, overlap_reorder=False), dict(TRACED, overlap_reorder=True), metrics=["overlap_ratio"])
"""


@pytest.mark.parametrize(("lost", "ratio"), [("in_line", "0"), nightly("not_ahead", r"0(\.0\d*)?")])
def test_overlap_that_is_lost_is_caught_with_the_reason_on_cpu_ranks(inner, on_cpu, lost, ratio):
    """Run collectives in line with compute and, in a traced model, gather parameters only when they are used."""
    result = inner(INNER, "-k", lost)
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.re_match_lines_random(
        [
            rf"E +Regression: overlap_ratio -\d\d\.\d points \(0\.\d+ -> {ratio}, limit 10 points\)",
            r"E +cause +.*(all_gather|reduce_scatter) exposed [\d.]+ ms/step, was [\d.]+; rank [01] worst",
        ]
    )
