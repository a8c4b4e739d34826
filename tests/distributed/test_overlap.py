"""The overlap suite: real workloads against the stored baselines of the platform."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.overlap,
    pytest.mark.world(size="all", warm=True),
    pytest.mark.tolerance(step_time_p50="5%"),
    pytest.mark.launch_timeout(180),
]


def test_fsdp_overlapping(workload, fsdp_config, varying_config):
    config = fsdp_config | varying_config
    result = workload.run("fsdp", comm_stream=True, h2d_prefetch=True, optimizer="sgd", **config)
    workload.check(result)


def test_fsdp_serial(workload, fsdp_config):
    result = workload.run("fsdp", comm_stream=False, h2d_prefetch=False, **fsdp_config)
    workload.check(result)


def test_llama_fsdp2(workload, llama_config):
    result = workload.run("llama_fsdp2", **llama_config)
    workload.check(result)


def test_llama_simple_fsdp(workload, llama_config):
    """Compare the traced model with one bucket per block."""
    result = workload.run("llama_simple_fsdp", bucketing="transformer_block", **llama_config)
    workload.check(result)


def test_ranking(workload, ranking_config):
    result = workload.run("ranking", **ranking_config)
    workload.check(result)


def test_ddp_overlap(workload, ddp_config):
    result = workload.run("ddp_overlap", **ddp_config)
    workload.check(result)


def test_ddp_stressed(workload, ddp_config):
    """Compare DDP with reduce-scatters beside the all-reduces."""
    result = workload.run("ddp_overlap", overlap_reduce_scatter=True, **ddp_config)
    workload.check(result)


def test_copy_compute(workload, copy_config):
    result = workload.run("copy_compute", **copy_config)
    workload.check(result)
