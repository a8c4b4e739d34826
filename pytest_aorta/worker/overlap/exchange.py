"""Values of all ranks, exchanged between profiled steps. Both functions are collective where a process group exists."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from pytest_aorta.result.trace.profiled_steps import CollectiveCalls
from pytest_aorta.worker.group_device import group_device


def largest_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return each value's maximum over ranks."""
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=group_device(device))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def calls_of_all_ranks(own: Sequence[CollectiveCalls], device: torch.device) -> list[list[CollectiveCalls]]:
    """Return the collectives' calls of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [list(own)]
    text = msgspec.json.encode(own)
    # Ranks of a pipeline make unequal calls, so the texts differ in length.
    size, device = int(largest_over_ranks([len(text)], device)[0]), group_device(device)
    # JSON may end with spaces.
    padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(device)
    texts = torch.empty(dist.get_world_size() * size, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(texts, padded)
    received = texts.view(-1, size).cpu()
    return [msgspec.json.decode(bytes(row.numpy()), type=list[CollectiveCalls]) for row in received]
