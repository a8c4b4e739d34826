"""torchtitan's own train entry, compared with a stored baseline."""

from __future__ import annotations

import pytest

ARGUMENTS = [
    "--experimental.custom-import=titan_parts",
    "--model.name=random.llama3",
    "--model.flavor=debugmodel",
    "--training.steps=40",
    "--training.local-batch-size=1",
    "--training.seq-len=64",
    "--training.mixed-precision-param=float32",
    "--metrics.log-freq=10",
    "--debug.deterministic",
    "--debug.seed=0",
]


@pytest.mark.overlap
@pytest.mark.numerics
@pytest.mark.world(size="all")
def test_debug_model(workload):
    """Compare overlap, costs and weights with the baseline."""
    workload.check(workload.run_script("torchtitan.train", ARGUMENTS, record={"hash_weights": True}))
