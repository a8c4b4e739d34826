"""Tests that compare two workloads and a script with their version of ``--aorta-ab``, on CPU ranks."""

from __future__ import annotations

import json

import pytest

from pytest_aorta.plan.workload.declaration import find_workload, resolve_config

pytestmark = pytest.mark.world(size=2, device="cpu", warm=True)

STEPS = 3
FSDP = {"steps": STEPS, "warmup": 1, "verify": 2, "optimizer": "sgd"}
LLAMA = {"size": "debug", "n_layers": 1, "steps": STEPS, "warmup": 0, "hash_every": 1, "optimizer_fused": False}
RANKING = {"steps": STEPS, "warmup": 0, "dim": 32, "n_layers": 1, "ffn_hidden": 64, "batch_size": 8}


@pytest.fixture
def compare(workload, distributed_world):
    """Compare the numerics of a result with those of the same launch of the older version."""

    def compare_with_older(result, metrics, steps=None):
        older = distributed_world.again(result, reference=True)
        verdicts = workload.compare(result, older, metrics=metrics, steps=steps)
        assert {row.metric: row.outcome for row in verdicts.rows} == dict.fromkeys(metrics, "pass")

    return compare_with_older


def test_fsdp(workload, compare):
    bytes_per_step = ["all_gather_bytes_per_step", "reduce_scatter_bytes_per_step"]
    compare(workload.run("fsdp", **FSDP), ["weight_hash", *bytes_per_step])


def test_llama_fsdp2(workload, compare):
    compare(workload.run("llama_fsdp2", **LLAMA), ["weight_hash", "loss", "grad_norm"], STEPS)


def test_script(workload, compare):
    config = resolve_config(find_workload("ranking", []), RANKING)
    result = workload.run_script("tests/distributed/scripts/plain_ddp.py", [json.dumps(config), "unfused"])
    compare(result, ["weight_hash"], STEPS)
