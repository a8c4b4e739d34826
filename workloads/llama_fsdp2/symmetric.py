"""All-gathers of FSDP2 into symmetric memory, which every rank maps, by NCCL's kernels or by the GPUs' copy engines.

FSDP2's buffers come from torch's pool of symmetric memory, and NCCL then chooses an all-gather that writes into the
other ranks' buffers directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..common.collectives import all_gather

DEFAULT, SYMMETRIC, COPY_ENGINE = "default", "symmetric", "copy_engine"
# The first version of NCCL that has each kind.
_NCCL_VERSIONS = {SYMMETRIC: (2, 27), COPY_ENGINE: (2, 28)}
# NCCL's value for leaving collectives to copy engines where possible.
_ZERO_CTA_POLICY = "2"


def use_copy_engines() -> None:
    """Have NCCL use copy engines where buffers allow; call before the process group is made."""
    os.environ["NCCL_CTA_POLICY"] = _ZERO_CTA_POLICY


def check_all_gather(kind: str, device: torch.device, num_shards: int) -> None:
    """Raise ValueError if all-gathers of this kind can't run here; the message names the key and the cause."""
    asked = f"all_gather is {kind!r}"
    if device.type != "cuda":
        raise ValueError(f"{asked} and ranks run on {device.type}; symmetric memory is that of CUDA devices")
    if num_shards == 1:
        raise ValueError(f"{asked} and parameters are on one rank, which gathers nothing; use more ranks")
    version, needed = torch.cuda.nccl.version(), _NCCL_VERSIONS[kind]
    if version < needed:
        raise ValueError(
            f"{asked} and NCCL is {'.'.join(map(str, version))}; all-gathers of this kind came with "
            f"NCCL {'.'.join(map(str, needed))}"
        )


def gather_symmetrically(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Have all groups of FSDP2 in ``model``, whose parameters are sharded over ``group``, gather symmetrically."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Torch 2.11 lacks this method; the rest of this function, and SymmetricAllGather, go with the support of 2.11.
    if hasattr(FSDPModule, "set_symm_mem_for_comm"):
        for unit in units:
            unit.set_symm_mem_for_comm()
        return
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend("NCCL")
    # Windows can only be registered with a communicator that exists.
    dist.barrier(group)
    gather: Any = SymmetricAllGather(symmetric_memory.get_mem_pool(device), symmetric_memory.rendezvous)
    for unit in units:
        unit.set_custom_all_gather(gather)


class SymmetricAllGather:
    """A replacement for FSDP2's all-gather; FSDP2's own base class for replacements is in a private module."""

    def __init__(self, pool: torch.cuda.MemPool, rendezvous: Callable[..., object]) -> None:
        self._pool, self._rendezvous = pool, rendezvous

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer of the pool; ranks allocate in the same order, so offsets are equal."""
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather into ``output_tensor``, which contains ``input_tensor`` at this rank's offset."""
        # Torch registers memory with NCCL once, however often the pool hands the memory out.
        self._rendezvous(output_tensor, group=group.group_name)
        return all_gather(output_tensor, input_tensor, group, async_op=async_op)
