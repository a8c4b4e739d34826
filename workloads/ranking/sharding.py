"""FSDP2 over the tables and each encoder block, and where its collectives run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pytest_aorta.worker import Handle, StreamSpans, Transfer

from ..common.collectives import all_gather, reduce_scatter
from ..common.fsdp2 import prefetch, sum_gradients
from .model import RankingModel
from .waits import hold_where_it_waits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: RankingModel, config: Mapping[str, Any], device: torch.device, spans: StreamSpans) -> FSDPModule:
    """Shard the tables and each block over all ranks; the tower and the head stay replicated."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config["param_dtype"]],
        reduce_dtype=DTYPES[config["reduce_dtype"]],
        # Modules take what those before them give; row numbers may not be rounded.
        cast_forward_inputs=False,
    )
    reshard = config["reshard_after_forward"]
    units = [
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for module in (model.tables, *model.blocks)
    ]
    replicated = {*model.dense_tower.parameters(), *model.head.parameters()}
    root: FSDPModule = fully_shard(model, mesh=mesh, ignored_params=replicated)
    sum_gradients(model)
    prefetch(units, config["forward_prefetch"], config["backward_prefetch"])
    has_spans = config["span_every"] > 0
    _place_collectives(units, device, spans if has_spans else None, one_stream=config["one_stream"])
    if has_spans:
        for unit in units:
            hold_where_it_waits(unit, spans)
    return root


def _place_collectives(
    units: Sequence[FSDPModule], device: torch.device, spans: StreamSpans | None, *, one_stream: bool
) -> None:
    """Leave FSDP2's collectives on its own streams on CUDA, or move them to the compute stream; with spans around them.

    On CPU ranks FSDP2 waits for each collective at once; an all-gather that hands back its work is waited for
    where its parameters are used.
    """
    gather = scatter = _at_once
    if device.type == "cpu" and not one_stream:
        gather = _as_work
    elif device.type == "cuda" and one_stream:
        gather = scatter = _InLine(torch.cuda.current_stream(device))
    elif spans is None:
        return
    for unit in units:
        unit.set_custom_all_gather(_Gather(gather, spans))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Scatter(scatter, spans))  # type: ignore[arg-type]


# Runs a collective that is given whether to be asynchronous.
_Run: TypeAlias = Callable[[Transfer], Handle | None]


def _at_once(collective: Transfer) -> Handle | None:
    """Where FSDP2 calls it: on CUDA on its stream."""
    return collective(False)


def _as_work(collective: Transfer) -> Handle | None:
    """Leave it to gloo's threads."""
    return collective(True)


class _InLine:
    """On the compute stream: whatever is enqueued next, there or on FSDP2's stream, comes after the collective."""

    def __init__(self, compute: torch.cuda.Stream) -> None:
        self._compute = compute

    def __call__(self, collective: Transfer) -> None:
        own = torch.cuda.current_stream()
        self._compute.wait_stream(own)
        with torch.cuda.stream(self._compute):
            collective(False)
        own.wait_stream(self._compute)


class _Collective:
    """What FSDP2 calls in place of a collective of its own; its base class for that is in a private module."""

    def __init__(self, run: _Run, spans: StreamSpans | None) -> None:
        self._run = run
        self._spans = spans

    def _do(self, name: str, collective: Transfer) -> Handle | None:
        return self._run(self._spans.around(name, collective) if self._spans else collective)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Room for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Handle | None:
        def gather(asynchronous: bool) -> Handle | None:
            return all_gather(output_tensor, input_tensor, group, async_op=async_op or asynchronous)

        return self._do("all_gather", gather)


class _Scatter(_Collective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Handle | None:
        def scatter(asynchronous: bool) -> Handle | None:
            return reduce_scatter(output_tensor, input_tensor, op, group, async_op=async_op or asynchronous)

        return self._do("reduce_scatter", scatter)
