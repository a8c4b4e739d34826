"""Buckets of blocks, and the keys of communication that a Llama workload refuses."""

from __future__ import annotations

import os

import pytest
import torch
from aorta_workloads.llama.parallel.communication import CommunicationSettings, turn_off_multicast
from aorta_workloads.llama.parallel.mesh import Degrees
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.llama_fsdp2.symmetric import check_all_gather
from hypothesis import given
from hypothesis import strategies as st

from tests.rank.settings import make_settings

CUDA = torch.device("cuda", 0)


@given(num_blocks=st.integers(1, 40), size=st.integers(1, 50), kept=st.integers(0, 50))
def test_buckets_cover_all_blocks_in_order_and_keep_exactly_the_last_ones(num_blocks, size, kept):
    settings = CommunicationSettings(blocks_per_bucket=size, unsharded_blocks=kept)
    whole_buckets = {0, *(num_blocks - start for start in range(0, num_blocks, size))}
    if kept not in whole_buckets:
        with pytest.raises(ValueError, match=f"unsharded_blocks is {kept}, and {num_blocks} blocks"):
            settings.buckets(num_blocks, reshard_after_forward=True)
        return

    buckets = settings.buckets(num_blocks, reshard_after_forward=True)

    assert [block for bucket in buckets for block in bucket.blocks] == list(range(num_blocks))
    assert {len(bucket.blocks) for bucket in buckets[:-1]} <= {size}
    assert len(buckets[-1].blocks) <= size
    unsharded = [block for bucket in buckets if not bucket.is_resharded for block in bucket.blocks]
    assert unsharded == list(range(num_blocks - kept, num_blocks))


def test_no_bucket_is_resharded_without_reshard_after_forward():
    buckets = CommunicationSettings(blocks_per_bucket=2).buckets(5, reshard_after_forward=False)

    assert [bucket.is_resharded for bucket in buckets] == [False] * 3


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"unsharded_blocks": 1, "reshard_after_forward": False}, "unsharded_blocks is 1 and reshard_after_forward"),
        ({"async_tensor_parallel": True}, "async_tensor_parallel is true and tensor_parallel_degree is 1"),
        (
            {"async_tensor_parallel": True, "tensor_parallel_degree": 2},
            "blocks are not compiled by inductor; add compile_blocks true",
        ),
        ({"all_gather": "symmetric", "expert_parallel_degree": 2}, "expert_parallel_degree is 2 and all_gather is"),
    ],
)
def test_keys_of_fsdp2_that_contradict_each_other_are_refused(keys, cause):
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys)

    with pytest.raises(ValueError, match=cause):
        settings.check_degrees(Degrees.of_world(settings.degrees, 4))


def test_all_gathers_name_why_they_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    with pytest.raises(ValueError, match="ranks run on cpu"):
        check_all_gather("symmetric", torch.device("cpu"), 2)
    with pytest.raises(ValueError, match="parameters are on one rank"):
        check_all_gather("symmetric", CUDA, 1)
    with pytest.raises(ValueError, match=r"NCCL is 2\.27\.5; all-gathers of this kind came with NCCL 2\.28"):
        check_all_gather("copy_engine", CUDA, 2)
    check_all_gather("symmetric", CUDA, 2)


VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_CTA_POLICY")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({}, (None, None, None)),
        ({"async_tensor_parallel": True}, ("0", "1", None)),
        ({"all_gather": "symmetric"}, ("0", "1", None)),
        ({"all_gather": "copy_engine"}, ("0", "1", "2")),
    ],
)
def test_symmetric_memory_turns_multicast_off_whatever_was_set(monkeypatch, keys, values):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys)

    settings.prepare_environment()

    assert tuple(os.environ.get(name) for name in VARIABLES) == values


def test_multicast_that_was_on_is_turned_off(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")

    turn_off_multicast()

    assert (os.environ["NCCL_NVLS_ENABLE"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
