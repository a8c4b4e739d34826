"""Graphs of streams of twenty variants of FSDP2 and DDP: their digests, and the collectives that nothing can hide.

Run: python -m benchmarks.overlap.graphs [--device cuda] [--ranks 8] [VARIANT...]

Each variant runs as one rank of a simulated world. The rows of CPU ranks, of a GPU and of another number of ranks have
to be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_aorta.result.trace.schedule import play
from pytest_aorta.result.trace.step_graph import StepGraph, Work
from pytest_aorta.worker.costs import StepCounter
from pytest_aorta.worker.simulation import simulate_world

LAYERS, DIM, TOKENS = 6, 256, 32


def _fsdp2(device: torch.device, *units: int, **options: object) -> nn.Sequential:
    """Return layers under FSDP2, ``units`` of them in a unit in turn; else each in its own."""
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)]).to(device)
    layers = list(model)
    for size in units or [1] * LAYERS:
        unit, layers = layers[:size], layers[size:]
        fully_shard(unit if size > 1 else unit[0], **options)
    return fully_shard(model, **options)


def _current(device: torch.device) -> object:
    return torch.get_device_module(device).current_stream()


def _of_units(model: nn.Sequential) -> object:
    return model[0]._get_fsdp_state()._comm_ctx


def _one_stream(device: torch.device) -> nn.Module:
    model = _fsdp2(device)
    for module in (model, *model):
        module._get_fsdp_state()._comm_ctx.get_all_gather_streams = lambda *_: (_current(device), _current(device))
    return model


def _each(model: nn.Sequential, change: Callable[[nn.Module, int], object]) -> nn.Module:
    for number, layer in enumerate(model):
        change(layer, number)
    return model


def _before(model: nn.Sequential, call: Callable[[nn.Module], object]) -> nn.Module:
    return _each(
        model, lambda layer, _: layer.register_forward_pre_hook(lambda *_: (call(layer), None)[1], prepend=True)
    )


def _gathers_wait(device: torch.device) -> nn.Module:
    model = _fsdp2(device)
    return _before(model, lambda _: _of_units(model).all_gather_stream.wait_stream(_current(device)))


def _reductions_wait(device: torch.device) -> nn.Module:
    model = _fsdp2(device)

    def wait(*_: object) -> None:
        _current(device).wait_stream(_of_units(model).reduce_scatter_stream)

    return _each(model, lambda layer, _: layer.register_full_backward_pre_hook(wait))


def _reduces_in_each(device: torch.device) -> nn.Module:
    total = torch.zeros(1024, device=device)
    return _before(_fsdp2(device), lambda _: dist.all_reduce(total))


def _reads_in_each(device: torch.device) -> nn.Module:
    value = torch.zeros((), device=device)
    return _before(_fsdp2(device), lambda _: value.item())


def _ddp(device: torch.device, bucket_cap_mb: float = 0.3, **options: object) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)]).to(device)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)


def _ddp_hook(device: torch.device) -> nn.Module:
    model = _ddp(device)
    model.register_comm_hook(None, allreduce_hook)
    return model


def _by_hand(device: torch.device, after: str) -> nn.Module:
    """Reduce gradients as they come, or after the backward pass."""
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)]).to(device)
    model.after, model.works = after, []
    if after == "each":
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(
                lambda weight: model.works.append(dist.all_reduce(weight.grad, async_op=True))
            )
    return model


VARIANTS: dict[str, Callable[[torch.device], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp2, forward prefetch of two": lambda device: _each(
        model := _fsdp2(device), lambda layer, at: layer.set_modules_to_forward_prefetch(list(model)[at + 1 : at + 3])
    ),
    "fsdp2, no reshard": lambda device: _fsdp2(device, reshard_after_forward=False),
    "fsdp2, two layers a unit": lambda device: _fsdp2(device, 2, 2, 2),
    "fsdp2, three layers a unit": lambda device: _fsdp2(device, 3, 3),
    "fsdp2, one unit": lambda device: _fsdp2(device, 6),
    "fsdp2, gathers on the compute stream": _one_stream,
    "fsdp2, gathers wait for compute": _gathers_wait,
    "fsdp2, backward waits for reductions": _reductions_wait,
    "fsdp2, no prefetch in backward": lambda device: _each(
        _fsdp2(device), lambda layer, _: layer.set_modules_to_backward_prefetch([layer])
    ),
    "fsdp2, an all-reduce in each layer": _reduces_in_each,
    "fsdp2, a value read in each layer": _reads_in_each,
    "ddp": _ddp,
    "ddp, buckets of two layers": lambda device: _ddp(device, 0.6),
    "ddp, one bucket": lambda device: _ddp(device, 25),
    "ddp, static graph": lambda device: _ddp(device, static_graph=True),
    "ddp, gradients as views": lambda device: _ddp(device, gradient_as_bucket_view=True),
    "ddp, hook": _ddp_hook,
    "reduced by hand in backward": lambda device: _by_hand(device, "each"),
    "reduced by hand after backward": lambda device: _by_hand(device, "all"),
}


def graph_of(make: Callable[[torch.device], nn.Module], device: torch.device) -> StepGraph:
    """Return the graph of the fourth step of a variant."""
    torch.manual_seed(0)
    model, batch = make(device), torch.randn(TOKENS, DIM, device=device)
    counter = StepCounter(device)

    def step() -> None:
        model(batch).sum().backward()
        for work in getattr(model, "works", ()):
            work.wait()
        if getattr(model, "after", "") == "all":
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        model.zero_grad()

    for _ in range(3):
        step()
        if hasattr(model, "works"):
            model.works.clear()
    with counter.step():
        step()
    graph = counter.costs().graph
    assert graph is not None
    return graph


def related(graph: StepGraph) -> str:
    """Return a digest of which matrix products come before and after each collective, and of their sizes.

    Other operators differ between devices.
    """
    kept = [number for number, node in enumerate(graph.nodes) if node.flops or node.work is Work.COLLECTIVE]
    before: list[int] = []
    for node in graph.nodes:
        before.append(0)
        for earlier in node.after:
            before[-1] |= before[earlier] | 1 << earlier
    rows = [
        (
            graph.nodes[one].name if graph.nodes[one].work is Work.COLLECTIVE else "",
            graph.nodes[one].flops,
            [at for at, other in enumerate(kept) if before[one] >> other & 1],
        )
        for one in kept
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("variants", nargs="*", default=VARIANTS, metavar="VARIANT")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(given.ranks)}
    simulate_world()
    dist.init_process_group("gloo" if given.device == "cpu" else "nccl")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    for name in given.variants:
        graph = graph_of(VARIANTS[name], device)
        played = play(graph)
        print(
            f"{name}: {related(graph)}, {played.serialized} of {played.collectives} serialized, overlap "
            f"{played.overlap_ratio:.3f}, streams {', '.join(graph.streams)}{'; not seen: ' if graph.unseen else ''}"
            f"{', '.join(graph.unseen)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
