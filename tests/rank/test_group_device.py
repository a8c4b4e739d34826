"""The device on which a process group exchanges tensors, by the group's backends."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pytest_aorta.worker.accelerator import group_device
from tests.rank.ranks import own_group


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:mpi", "cpu", "cpu"),
    ],
)
def test_gloo_exchanges_tensors_of_cpus_and_nccl_those_of_gpus(backends, device, expected):
    with patch.object(dist, "get_backend_config", return_value=backends):
        assert group_device(torch.device(device)) == torch.device(expected)


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_group_that_a_script_initializes_with_or_without_a_backend(tmp_path, backend):
    with own_group(tmp_path, backend):
        assert group_device(torch.device("cpu"), dist.group.WORLD) == torch.device("cpu")
        assert group_device(torch.device("meta")) == torch.device("cpu")
