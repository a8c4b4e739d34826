"""Collectives under one name: torch 2.13 renamed two of them and warns about the old names."""

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

Collective: TypeAlias = Callable[..., dist.Work | None]
all_gather: Collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
