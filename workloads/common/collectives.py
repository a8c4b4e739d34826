"""Collectives under one name: torch 2.13 renamed two of them and warns about the old names."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

all_gather: Callable[..., dist.Work | None]
reduce_scatter: Callable[..., dist.Work | None]
if hasattr(dist, "all_gather_single"):
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
