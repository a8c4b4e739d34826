"""Weights compared bit for bit with the stored baseline, and between two launches of one run."""

import os

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size="all", warm=True), pytest.mark.launch_timeout(180)]


@pytest.mark.skipif(bool(os.environ.get("TORCH")), reason="bits are stored for the torch of constraints.txt alone")
def test_llama_fsdp2_deterministic(workload, config_of):
    workload.check(workload.run("llama_fsdp2", **config_of("llama") | {"steps": 10, "deterministic": True}))


def test_two_launches_of_one_run_compute_equal_bits(workload, distributed_world, config_of):
    first = workload.run("llama_fsdp2", **config_of("llama") | {"steps": 10, "deterministic": True})
    again = distributed_world.again(first)
    verdicts = workload.compare(again, first, metrics=["weight_hash", "final_loss"])
    assert [row.outcome for row in verdicts.rows] == ["pass", "pass"]
    workload.compare(again, first, steps=10, metrics=["loss", "grad_norm"], label="steps")
