"""The config keys of communication that both Llama workloads have, and their effects on a rank."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

# NVLink multicast is off wherever symmetric memory is used: a fault in it can take all GPUs of a host out of service.
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclass(frozen=True)
class Bucket:
    """Consecutive blocks, by number from 0, whose parameters share a collective.

    Attributes:
        blocks: the numbers of the blocks.
        is_resharded: whether gathered parameters are freed between forward and backward.
    """

    blocks: range
    is_resharded: bool


@dataclass(frozen=True)
class CommunicationSettings:
    """The keys of collectives, which each workload implements in its own way.

    If ``unsharded_blocks`` is None, setup replaces it by a number that depends on the memory that steps need.
    """

    blocks_per_bucket: int = 1
    unsharded_blocks: int | None = 0
    async_tensor_parallel: bool = False

    def buckets(self, num_blocks: int, *, reshard_after_forward: bool) -> list[Bucket]:
        """Divide ``num_blocks`` blocks, those of the model or of this rank's stage; the last bucket may be smaller.

        The last ``unsharded_blocks`` of them, which backward begins with, keep their gathered parameters.

        Raises:
            ValueError: ``unsharded_blocks`` is more than all blocks, or not a number of whole buckets.
        """
        size, num_kept = self.blocks_per_bucket, self.unsharded_blocks or 0
        starts, first_kept = range(0, num_blocks, size), num_blocks - num_kept
        if num_kept not in (allowed := self.whole_buckets(num_blocks)):
            raise ValueError(
                f"unsharded_blocks is {num_kept}, and {num_blocks} blocks are divided into buckets of "
                f"blocks_per_bucket {size}; whole buckets are kept, so allowed are {allowed}"
            )
        return [
            Bucket(range(start, min(start + size, num_blocks)), reshard_after_forward and start < first_kept)
            for start in starts
        ]

    def whole_buckets(self, num_blocks: int) -> list[int]:
        """Return the numbers of last blocks, from 0 on, that are whole buckets."""
        return [0, *(num_blocks - start for start in reversed(range(0, num_blocks, self.blocks_per_bucket)))]

    def check_resharding(self, *, reshard_after_forward: bool) -> None:
        """Raise ValueError if some blocks are to keep their parameters although all blocks do."""
        if self.unsharded_blocks != 0 and not reshard_after_forward:
            shown = "null" if self.unsharded_blocks is None else self.unsharded_blocks
            raise ValueError(
                f"unsharded_blocks is {shown} and reshard_after_forward is false, which keeps the "
                f"parameters of all blocks; use one of the two"
            )

    def check_async_tensor_parallel(self, degree: int, *, compiler: str, is_compiled: bool) -> None:
        """Raise ValueError if blocks have no collectives of activations that inductor could divide.

        Args:
            degree: ``tensor_parallel_degree``.
            compiler: the config key, with the value, that makes inductor compile blocks.
            is_compiled: whether the config has that value.
        """
        if not self.async_tensor_parallel:
            return
        if degree == 1:
            raise ValueError(
                "async_tensor_parallel is true and tensor_parallel_degree is 1: no activations are exchanged; allowed "
                "is a degree of 2 or more"
            )
        if not is_compiled:
            raise ValueError(
                f"async_tensor_parallel is true: inductor divides matrix products and their collectives, and blocks "
                f"are not compiled by inductor; add {compiler}"
            )

    def check_device(self, device_type: str) -> None:
        """Raise ValueError for a key that needs GPUs on another device."""
        if self.async_tensor_parallel and device_type != "cuda":
            raise ValueError(
                f"async_tensor_parallel is true and ranks run on {device_type}: the divided products write into "
                f"memory of other GPUs; allowed are CUDA devices"
            )


def turn_off_multicast() -> None:
    """Turn NVLink multicast off in NCCL and in torch's symmetric memory; call before the process group is made."""
    os.environ.update(_WITHOUT_MULTICAST)


def divided_products(mesh: DeviceMesh) -> dict[str, Any]:
    """Return inductor's options that divide matrix products and overlap the parts with their collectives over ``mesh``.

    Torch refuses the options if this version lacks the pass.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    from .flat_gathers import FlatGathers

    group = mesh.get_group().group_name
    with warnings.catch_warnings():
        # Deprecated from torch 2.10 on, but the pass still ignores groups without this call.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group)
    return {"_micro_pipeline_tp": True, "post_grad_custom_pre_pass": FlatGathers(group)}
