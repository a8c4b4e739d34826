"""The overlap suite: real workloads against the stored baselines of the platform."""

import pytest

pytestmark = [
    pytest.mark.overlap,
    pytest.mark.world(size="all", warm=True),
    pytest.mark.launch_timeout(180),
]


def test_fsdp_overlapping(workload, config_of):
    config = config_of("fsdp") | config_of("varying")
    result = workload.run("fsdp", comm_stream=True, h2d_prefetch=True, optimizer="sgd", **config)
    workload.check(result)


def test_fsdp_serial(workload, config_of):
    result = workload.run("fsdp", comm_stream=False, h2d_prefetch=False, **config_of("fsdp"))
    workload.check(result)


def test_llama_fsdp2(workload, config_of):
    result = workload.run("llama_fsdp2", **config_of("llama"))
    workload.check(result)


def test_llama_simple_fsdp(workload, config_of):
    """Compare the traced model with one bucket per block."""
    result = workload.run("llama_simple_fsdp", bucketing="transformer_block", **config_of("llama"))
    workload.check(result)


def test_ranking(workload, config_of):
    result = workload.run("ranking", **config_of("ranking"))
    workload.check(result)


def test_ddp_overlap(workload, config_of):
    result = workload.run("ddp_overlap", **config_of("ddp"))
    workload.check(result)


def test_ddp_stressed(workload, config_of):
    """Compare DDP with reduce-scatters beside the all-reduces."""
    result = workload.run("ddp_overlap", overlap_reduce_scatter=True, **config_of("ddp"))
    workload.check(result)


def test_copy_compute(workload, config_of):
    result = workload.run("copy_compute", **config_of("copy"))
    workload.check(result)
