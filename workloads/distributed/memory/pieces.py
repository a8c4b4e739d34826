"""The bytes of one rank's parts of a step, measured by running each part once on fake tensors.

Fake tensors have shapes, dtypes and a device but no memory, so the parts run without allocating and without
communicating. This module and ``llama/partitioner.py`` contain this package's uses of torch's compiler interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...models.common.decoder import Block, Decoder
from ...models.common.loss import summed_cross_entropy
from ...models.common.moe import MoeFeedForward
from ..activation_checkpoint import LADDER, checkpointed
from ..expert import AllToAllDispatcher
from .live import LiveBytes
from .step import Activations

INDUCTOR = "inductor"
# The number of float32 tensors, each of the size of one chunk's logits, that the unfused chunked loss makes at once.
_UNFUSED_COPIES = 4


@dataclass(frozen=True)
class Shapes:
    """The sizes of one micro-batch on this rank.

    Attributes:
        batch_size: number of sequences.
        num_inputs: number of positions of a sequence whose activations the rank holds between modules.
        num_positions: number of positions of a sequence that the rank computes: ``num_inputs`` times the degree of
            tensor parallelism.
        dtype: dtype of the activations and of gathered parameters.
        device: device of the fake tensors.
    """

    batch_size: int
    num_inputs: int
    num_positions: int
    dtype: torch.dtype
    device: torch.device


def by_kind(model: Decoder, shapes: Shapes, compiler: str | None) -> dict[str, Activations]:
    """Return the activations of one block of ``model`` under each kind of checkpointing.

    Args:
        model: the model on the meta device, changed for all axes of parallelism and not yet sharded.
        compiler: the torch.compile backend of the blocks; None for eager blocks.
    """
    block = next(iter(model.layers.children()))
    assert isinstance(block, Block)
    measured = {}
    with _fake(block, shapes), _bounded_exchange(block):
        inputs = _inputs(model, shapes), _rotations(model, shapes)
        for kind in LADDER:
            block.checkpoint = checkpointed(kind)
            measured[kind] = _measure(block, inputs, block, compiler)
    return measured


def of_loss(model: Decoder, shapes: Shapes, *, fused: bool) -> Activations:
    """Return the activations of the last norm, the output and the loss; zero in a stage without them."""
    if isinstance(model.output, nn.Identity):
        return Activations(0, 0)
    tail = nn.ModuleList([model.norm, model.output])

    def run(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(model.output(model.norm(x)), labels)

    with _fake(tail, shapes):
        return _measure(run, (_inputs(model, shapes), _labels(shapes)), tail, INDUCTOR if fused else None)


def of_chunked_loss(model: Decoder, shapes: Shapes, num_chunks: int) -> Activations:
    """Return the activations of the last norm and of the chunked loss.

    The loss is one operator, and fake tensors do not show the logits inside it, nor the float32 sum of the weight's
    gradients. Their bytes are computed.
    """
    tail = nn.ModuleList([model.norm, model.output])

    def run(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = model.output(model.norm(x), labels, 1)
        return scored

    with _fake(tail, shapes):
        seen = _measure(run, (_inputs(model, shapes), _labels(shapes)), tail)
    weight = model.output.weight
    num_rows, dim = (weight.to_local() if isinstance(weight, DTensor) else weight).shape
    num_logits = -(-shapes.batch_size * shapes.num_positions // num_chunks) * num_rows
    copies = 0 if model.output.fused else _UNFUSED_COPIES
    # The operator computes all gradients in forward, so its logits are gone when backward begins.
    hidden = num_logits * (2 * shapes.dtype.itemsize + copies * torch.float32.itemsize)
    if shapes.dtype != torch.float32:
        # The sum is rounded when the logits are gone. What it is rounded to is kept, and not yet there before.
        hidden = max(hidden - num_rows * dim * shapes.dtype.itemsize, 0) + num_rows * dim * torch.float32.itemsize
    return Activations(seen.kept, max(seen.working, hidden))


def _inputs(model: Decoder, shapes: Shapes) -> torch.Tensor:
    sizes = shapes.batch_size, shapes.num_inputs, model.config.dim
    return torch.empty(sizes, dtype=shapes.dtype, device=shapes.device, requires_grad=True)


def _rotations(model: Decoder, shapes: Shapes) -> torch.Tensor:
    return model.config.freqs_cis(torch.empty(shapes.num_positions, dtype=torch.int64, device=shapes.device))


def _labels(shapes: Shapes) -> torch.Tensor:
    return torch.empty((shapes.batch_size, shapes.num_positions), dtype=torch.int64, device=shapes.device)


def _measure(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    module: nn.Module,
    compiler: str | None = None,
) -> Activations:
    """Return the bytes of a forward and a backward pass, including the gradients of the parameters of ``module``.

    The first of ``inputs`` needs a gradient. Neither ``inputs`` nor the parameters themselves are counted.
    """
    live = LiveBytes(fused=compiler == INDUCTOR)
    run = function if compiler is None else _compiled(function, compiler, live)
    differentiated = [inputs[0], *module.parameters()]
    if compiler is not None:
        # Compilation runs operators too, which must not be counted.
        run(*inputs).sum().backward(inputs=differentiated)
        live.reset()
    with live:
        out = run(*inputs)
        kept = live.current
        gradients = torch.autograd.grad(out, differentiated, torch.empty_like(out), allow_unused=True)
        del gradients
    if compiler is not None:
        # Torch limits how often a function is compiled; the model's own compilations come later and need the whole
        # limit.
        torch.compiler.reset()
    return Activations(kept, live.peak - kept)


def _compiled(function: Callable[..., torch.Tensor], compiler: str, live: LiveBytes) -> Callable[..., torch.Tensor]:
    """Return the function as the compiler splits it into forward and backward, interpreted operator by operator."""
    # These imports take a second, so eager models skip them.
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from ...passes.partition import Partitioner

    def interpreted(graph: fx.GraphModule, _: Any) -> Any:
        def run(inputs: list[Any]) -> Any:
            results = fx.Interpreter(graph).boxed_run(inputs)
            live.keep(tree_leaves(results))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=interpreted,
        bw_compiler=interpreted,
        partition_fn=Partitioner(),
        decompositions=select_decomp_table() if compiler == INDUCTOR else {},
    )
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@contextmanager
def _fake(module: nn.Module, shapes: Shapes) -> Iterator[None]:
    """Run a block of code on fake tensors, which replace the parameters and buffers of ``module`` meanwhile."""
    own: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (values, name, value)
        for owner in module.modules()
        for values in (owner._parameters, owner._buffers)
        for name, value in values.items()
        if value is not None
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for values, name, value in own:
            is_parameter = isinstance(value, nn.Parameter)
            values[name] = (
                nn.Parameter(_empty(value, shapes)) if is_parameter else torch.empty_like(value, device=shapes.device)
            )
        try:
            yield
        finally:
            for values, name, value in own:
                values[name] = value


@contextmanager
def _bounded_exchange(block: Block) -> Iterator[None]:
    """Assume that this rank receives as many rows as it can, since the real number depends on data."""
    feed_forward = block.feed_forward
    if not isinstance(feed_forward, MoeFeedForward) or not isinstance(feed_forward.dispatcher, AllToAllDispatcher):
        yield
        return
    dispatcher = feed_forward.dispatcher
    feed_forward.dispatcher = dispatcher.bounded(feed_forward.top_k)
    try:
        yield
    finally:
        feed_forward.dispatcher = dispatcher


def _empty(parameter: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(parameter.shape, dtype=shapes.dtype, device=shapes.device)
    local = torch.empty(parameter.to_local().shape, dtype=shapes.dtype, device=shapes.device)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
