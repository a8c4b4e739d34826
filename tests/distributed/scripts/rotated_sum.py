"""Trains a Llama workload with a reduce-scatter whose order of summation depends on the offset in the payload.

NCCL's reduce-scatter behaves in this way if channels use different rings; gloo sums every element in one order.
Arguments: the workload's name, and its config as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from aorta_workloads.llama_fsdp2 import LlamaFsdp2Workload
from aorta_workloads.llama_simple_fsdp import LlamaSimpleFsdpWorkload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.worker import recorder

BYTES_OF_ONE_ORDER = 64


def rotated_reduce_scatter(payload: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's chunk of the sum; the first addend changes every 64 bytes of the chunk."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    gathered = [torch.empty_like(payload) for _ in range(size)]
    dist.all_gather(gathered, payload.contiguous(), group=group)
    chunks = torch.stack([whole.chunk(size)[rank].flatten() for whole in gathered])
    columns = torch.arange(chunks.shape[1])
    first = columns * payload.element_size() // BYTES_OF_ONE_ORDER % size
    total = chunks[first, columns]
    for following in range(1, size):
        total = total + chunks[(first + following) % size, columns]
    return total.view(payload.shape[0] // size, *payload.shape[1:])


class RotatedReduceScatter(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op == dist.ReduceOp.SUM, op
        output_tensor.copy_(rotated_reduce_scatter(input_tensor, group))


class RotatedFsdp2(LlamaFsdp2Workload):
    @staticmethod
    def shard(model, mesh, settings):
        LlamaFsdp2Workload.shard(model, mesh, settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(RotatedReduceScatter())


def traced_reduce_scatter(payload, op, group_size, group_name):
    assert op == "sum", op
    return rotated_reduce_scatter(payload, _resolve_process_group(group_name))


def main(name: str, given: str) -> None:
    spec = find_workload(name, [])
    config = resolve_config(spec, json.loads(given))
    library = torch.library.Library("_c10d_functional", "IMPL")
    if name == "llama_simple_fsdp":
        library.impl("reduce_scatter_tensor", traced_reduce_scatter, "CPU")
        workload = LlamaSimpleFsdpWorkload(config)
    else:
        workload = RotatedFsdp2(config)
    workload.setup()
    result = workload.run()
    recorder.start(torch.device("cpu"))
    for loss, norm in zip(result.loss, result.grad_norm, strict=True):
        with recorder.step():
            recorder.loss(loss)
            recorder.grad_norm(norm)
    for step, value in result.weight_hashes.items():
        recorder.weight_hash(int(step), value)
    for kind, hashes in result.tensor_hashes.items():
        recorder.tensor_hashes(kind, hashes)


main(*sys.argv[1:])
