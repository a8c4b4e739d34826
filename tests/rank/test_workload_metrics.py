"""Throughputs and bytes that workloads compute from their config, against values computed by hand."""

import pytest
import torch
from aorta_workloads.distributed.parallel_dims import ParallelDims
from aorta_workloads.fsdp.settings import Settings
from aorta_workloads.fsdp.workload import fsdp_metrics
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload
from aorta_workloads.ranking.training import Distributed
from aorta_workloads.ranking.workload import RankingWorkload

from tests.rank.settings import default_config
from tests.unit.builders import each_of

CPU = torch.device("cpu")


def test_fsdp_counts_three_products_and_two_gathers_of_each_layer():
    config = default_config(
        "fsdp", steps=5, layers=3, gemm_size=100, fsdp_shard_size=10, h2d_tensor_size=7, dtype="bfloat16"
    )
    assert fsdp_metrics(Settings.read(config, rank=0, world_size=4), device_time_s=2.0) == {
        # 5 steps of 9 products of 2 million operations, in 2 seconds.
        "gemm_throughput_tflops": pytest.approx(45e-6),
        "h2d_bytes_per_step": 14,
    }


@each_of("degrees, tokens_per_s", {"HSDP": (ParallelDims(2, 2, 1, 1), 480), "CP, TP": (ParallelDims(1, 1, 2, 2), 120)})
def test_tokens_of_a_sequence_are_divided_among_the_ranks_that_share_it(degrees, tokens_per_s):
    workload = LlamaFsdp2Workload(
        default_config("llama_fsdp2", steps=5, gradient_accumulation=3, batch_size=2, seq_len=32)
    )
    workload.device, workload.degrees, workload.num_parameters, workload.decision = CPU, degrees, 7, None
    assert workload.metrics(step_time_s=2.0, grad_norms=[0.25, 0.5]) == {
        "tokens_per_s": tokens_per_s,
        "num_parameters": 7,
        "grad_norm_last": 0.5,
    }


def test_samples_are_those_of_all_micro_batches_of_a_rank():
    workload = RankingWorkload(default_config("ranking", steps=5, gradient_accumulation=3, batch_size=8))
    workload.device, workload.num_parameters, workload.bytes_per_step = CPU, 7, 11
    workload.distributed = Distributed(None, None, None, lambda: {"own": 1})
    assert workload.metrics(step_time_s=2.0, grad_norms=[]) == {
        "own": 1,
        "samples_per_s": 60,
        "num_parameters": 7,
        "h2d_bytes_per_step": 11,
    }
