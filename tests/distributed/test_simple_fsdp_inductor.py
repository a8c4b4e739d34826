"""Compiler-based FSDP on inductor, whose fused kernels round other than eager ones: it is compared with itself."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

TRAINING = {"size": "debug", "n_layers": 1, "steps": 25, "warmup": 0, "hash_every": 1}


def test_bucketing_changes_no_bit_and_the_loss_stays_at_fsdp2s(workload):
    eager = workload.run("llama_fsdp2", **TRAINING)
    single = workload.run("llama_simple_fsdp", backend="inductor", bucketing="none", **TRAINING)
    bucketed = workload.run("llama_simple_fsdp", backend="inductor", **TRAINING)

    assert bucketed.weight_hashes == single.weight_hashes
    assert (bucketed.loss, bucketed.grad_norm) == (single.loss, single.grad_norm)
    assert single.loss == pytest.approx(eager.loss, rel=1e-5)
    assert single.grad_norm == pytest.approx(eager.grad_norm, rel=1e-4)
