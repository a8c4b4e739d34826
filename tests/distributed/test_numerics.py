"""Weights bit for bit: against the stored baseline, and between two launches of one run."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size="all", warm=True), pytest.mark.timeout(180)]


@pytest.mark.tolerance(weight_hash="exact", final_loss="exact", step_time_p50="5%")
def test_llama_fsdp2_deterministic(workload, llama_config):
    llama_config |= {"steps": 10, "deterministic": True}
    first = workload.run("llama_fsdp2", **llama_config)
    workload.check(first)
    second = workload.run("llama_fsdp2", **llama_config)
    verdicts = workload.compare(second, first, metrics=["weight_hash", "final_loss"])
    assert [row.outcome for row in verdicts.rows] == ["pass", "pass"]
    assert second.loss == first.loss
