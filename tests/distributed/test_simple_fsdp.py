"""Compiler-based FSDP against eager FSDP2: every bit of every step."""

import pytest

from pytest_aorta.verdict.statistics.decision import Outcome
from tests.distributed import TWO_CPU_RANKS
from tests.distributed.test_costs import judged

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS]

TRAINING = {"size": "debug"}
STEPS = 5


@pytest.mark.parametrize(
    ("given", "bucketings"),
    [
        pytest.param(
            {"param_dtype": "bfloat16", "n_layers": 1, "attention": "flex", "loss_chunks": 3},
            ["none", "transformer_block"],
            id="bfloat16 on 2 ranks",
        ),
        pytest.param(
            {"param_dtype": "float32"},
            ["none", "transformer_block", "auto"],
            id="float32 on 4 ranks",
            marks=[pytest.mark.world(size=4, device="cpu", warm=True), pytest.mark.extended],
        ),
    ],
)
def test_aot_eager_has_every_bit_of_fsdp2(workload, given, bucketings):
    training = TRAINING | given
    training |= {"steps": STEPS, "warmup": 0, "hash_every": 1}
    eager = workload.run("llama_fsdp2", **training)
    traced = {name: workload.run("llama_simple_fsdp", bucketing=name, **training) for name in bucketings}
    for bucketing, result in traced.items():
        workload.compare(result, eager, steps=STEPS, label=bucketing)
    # One launch shows that bucketing was lost.
    row = judged(traced["none"], traced["transformer_block"], "collectives")
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith("all_gather over ")
