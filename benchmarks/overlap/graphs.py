"""Graphs of streams of small programs and of changes of them: digests, and the collectives that nothing can hide.

Run: python -m benchmarks.overlap.graphs [--device cuda] [--ranks 8] [--cost] [PROGRAM...]
     torchrun --nproc-per-node 2 -m benchmarks.overlap.graphs --measured [PROGRAM...]

Each program runs as one rank of a simulated world. The rows of CPU ranks, of a GPU and of another number of ranks have
to be equal. ``--measured`` puts the schedules of larger layers beside the overlap that the GPUs of this host measure.
``--cost`` prints what the graph adds to the count of a step, behind which torch is as it was. With ``--train PROGRAM``
this is an ordinary training script, which the variable LOSS changes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import correlation, median
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from pytest_aorta.result.trace.schedule import Schedule, play
from pytest_aorta.result.trace.step_graph import StepGraph, Work
from pytest_aorta.worker import RankEnv, capture_overlap, collectives
from pytest_aorta.worker.costs import StepCounter
from pytest_aorta.worker.simulation import simulate_world, without_data


@dataclass(frozen=True)
class Sizes:
    """The device and sizes of a program, and options of FSDP2."""

    device: torch.device
    layers: int = 6
    dim: int = 256
    tokens: int = 32
    dtype: torch.dtype = torch.float32
    fsdp2: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> torch.Tensor:
        """Return a new batch."""
        return torch.randn(self.tokens, self.dim, device=self.device, dtype=self.dtype)

    def model(self) -> nn.Sequential:
        """Return new layers."""
        return nn.Sequential(
            *(
                nn.Linear(self.dim, self.dim, bias=False, device=self.device, dtype=self.dtype)
                for _ in range(self.layers)
            )
        )


# A model, and its forward and backward pass.
Program: TypeAlias = tuple[nn.Module, Callable[[], object]]
Make: TypeAlias = Callable[[Sizes], Program]


def _trained(sizes: Sizes, model: nn.Module, finish: Callable[[], object] = lambda: None) -> Program:
    batch = sizes.batch

    def step() -> None:
        model(batch).float().sum().backward()
        finish()

    return model, step


def _fsdp2(
    sizes: Sizes,
    *units: int,
    replicas: int = 1,
    change: Callable[[list[Any], int], object] = lambda _layers, _at: None,
    **options: Any,
) -> Program:
    """Return layers under FSDP2, ``units`` of them in a unit in turn, else each in its own."""
    model = sizes.model()
    layers: list[nn.Module] = [*model]
    if replicas > 1:
        options["mesh"] = init_device_mesh(
            sizes.device.type, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("r", "s")
        )
    for size in units or [1] * sizes.layers:
        unit, layers = layers[:size], layers[size:]
        fully_shard(unit if size > 1 else unit[0], **sizes.fsdp2, **options)
    fully_shard(model, **sizes.fsdp2, **options)
    for at in range(sizes.layers):
        change([*model], at)
    return _trained(sizes, model)


def _fsdp1(sizes: Sizes, *, wraps: bool = True, **options: Any) -> Program:
    def own(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=sizes.device, **options)

    return _trained(sizes, own(nn.Sequential(*map(own, sizes.model())) if wraps else sizes.model()))


class _Backwards(nn.Sequential):
    """Layers that run in the reverse of the order in which they are registered."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            batch = layer(batch)
        return batch


def _ddp(
    sizes: Sizes,
    layers_a_bucket: float = 1.2,
    order: type[nn.Sequential] = nn.Sequential,
    hook: Callable[..., Any] | None = None,
    **options: Any,
) -> Program:
    model = order(*sizes.model())
    bucket_mb = layers_a_bucket * model[0].weight.nbytes / 2**20  # type: ignore[operator]
    model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)
    if hook:
        model.register_comm_hook(None, hook)
    return _trained(sizes, model)


def _waiting_hook(_state: object, bucket):
    dist.all_reduce(bucket.buffer(), async_op=True).wait()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _by_hand(sizes: Sizes, *, after: bool = False, waits: bool = False) -> Program:
    """Reduce gradients as they come, or after the backward pass."""
    model = sizes.model()
    works: list[dist.Work] = []

    def reduce(weight: torch.Tensor) -> None:
        works.append(dist.all_reduce(weight.grad, async_op=True))
        if waits:
            works.pop().wait()

    def finish() -> None:
        for weight in model.parameters() if after else ():
            dist.all_reduce(weight.grad)
        while works:
            works.pop(0).wait()

    for weight in () if after else model.parameters():
        weight.register_post_accumulate_grad_hook(reduce)
    return _trained(sizes, model, finish)


class _Exchanging(nn.Sequential):
    """Layers whose input is exchanged beside products of each layer, or ``in_line`` with them."""

    def __init__(self, sizes: Sizes, exchange: Callable[..., Any], *, in_line: bool) -> None:
        super().__init__(*sizes.model())
        self._exchange, self._in_line = exchange, in_line

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        total = batch.new_zeros(())
        for layer in self:
            out = self._exchange(layer, batch, is_async=not self._in_line)
            total, batch = total + out.sum(), out.detach()[: len(batch)]
        return total


def _gathered(layer: nn.Module, batch: torch.Tensor, *, is_async: bool) -> torch.Tensor:
    """Gather a sequence in parts, and multiply each part when it has arrived."""
    parts = [(part, part.new_zeros(len(part) * dist.get_world_size(), part.shape[1])) for part in batch.chunk(4)]
    works = [dist.all_gather_into_tensor(whole, part, async_op=is_async) for part, whole in parts]
    found = []
    for (_, whole), work in zip(parts, works, strict=True):
        if work is not None:
            work.wait()
        found.append(layer(whole))
    return torch.cat(found)


def _sent(layer: nn.Module, batch: torch.Tensor, *, is_async: bool) -> torch.Tensor:
    """Send tokens to experts beside the product of a shared expert."""
    received = torch.zeros_like(batch)
    work = dist.all_to_all_single(received, batch, async_op=is_async)
    shared = layer(batch)
    if work is not None:
        work.wait()
    return shared + layer(received)  # type: ignore[no-any-return]


def _pipeline(sizes: Sizes, schedule: type[Any] = Schedule1F1B, micro_batches: int = 8) -> Program:
    """Return this rank's stage of two."""
    mesh = init_device_mesh(sizes.device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "stages"))
    model, number, batch = sizes.model(), mesh.get_local_rank("stages"), sizes.batch
    stage = PipelineStage(model, number, 2, sizes.device, group=mesh.get_group("stages"))
    passes = schedule(stage, micro_batches, loss_fn=lambda out, _: out.sum())
    return model, lambda: passes.step(target=batch) if number else passes.step(batch)


_IN_FSDP2 = ("no prefetch in forward", "no prefetch in backward", "gathers on the compute stream")
_IN_FSDP2 += ("reduce-scatters on the compute stream", "an extra wait")
_IN_ANY = ("an all-reduce in each layer", "a host wait")


def _changed(make: Make, *losses: str, **others: Make) -> dict[str, Make]:
    """Return a program without a change and with those of :func:`planted`; others have a function of their own."""
    return {"": make} | dict.fromkeys((*losses, *_IN_ANY), make) | others


# Each program by name, and of each what makes it: unchanged, with lost overlap, and with other changes.
PROGRAMS: dict[str, dict[str, Make]] = {
    "FSDP2": _changed(_fsdp2, *_IN_FSDP2)
    | {
        "one bucket": lambda sizes: _fsdp2(sizes, sizes.layers),
        "broken order of registration": partial(
            _fsdp2, change=lambda layers, at: layers[at].set_modules_to_backward_prefetch(layers[at + 1 : at + 2])
        ),
        "a value read in each layer": _fsdp2,
        "forward prefetch of two": partial(
            _fsdp2, change=lambda layers, at: layers[at].set_modules_to_forward_prefetch(layers[at + 1 : at + 3])
        ),
        "no reshard": partial(_fsdp2, reshard_after_forward=False),
        "two layers a unit": lambda sizes: _fsdp2(sizes, *[2] * (sizes.layers // 2)),
        "three layers a unit": lambda sizes: _fsdp2(sizes, *[3] * (sizes.layers // 3)),
    },
    "FSDP2, no reshard": {"": partial(_fsdp2, reshard_after_forward=False), "reshard after forward": _fsdp2},
    "HSDP": _changed(partial(_fsdp2, replicas=2), *_IN_FSDP2)
    | {"one bucket": lambda sizes: _fsdp2(sizes, sizes.layers, replicas=2)},
    "FSDP1": _changed(_fsdp1, *_IN_FSDP2[2:4])
    | {
        "no prefetch in backward": partial(_fsdp1, backward_prefetch=None),
        "one bucket": partial(_fsdp1, wraps=False),
    },
    "FSDP1, no reshard": {
        "": partial(_fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "reshard after forward": _fsdp1,
    },
    "DDP": _changed(_ddp)
    | {
        "buckets too large": partial(_ddp, layers_a_bucket=100),
        "reduced after backward": partial(_by_hand, after=True),
        "buckets of two layers": partial(_ddp, layers_a_bucket=2.4),
        "static graph": partial(_ddp, static_graph=True),
        "gradients as views": partial(_ddp, gradient_as_bucket_view=True),
    },
    "DDP, hook": {"": partial(_ddp, hook=allreduce_hook), "an extra wait": partial(_ddp, hook=_waiting_hook)},
    "DDP, buckets kept": {
        "": partial(_ddp, find_unused_parameters=True),
        "broken order of registration": partial(_ddp, find_unused_parameters=True, order=_Backwards),
    },
    "reduced by hand": _changed(_by_hand)
    | {"an extra wait": partial(_by_hand, waits=True), "reduced after backward": partial(_by_hand, after=True)},
    "TP": _changed(lambda sizes: _trained(sizes, _Exchanging(sizes, _gathered, in_line=False)))
    | {"TP without async": lambda sizes: _trained(sizes, _Exchanging(sizes, _gathered, in_line=True))},
    # Ranks of a pipeline are at different micro-batches, so that none of them can wait for all.
    "PP": {"": _pipeline, "a host wait": _pipeline, "PP by GPipe": partial(_pipeline, schedule=ScheduleGPipe)},
    "EP": _changed(lambda sizes: _trained(sizes, _Exchanging(sizes, _sent, in_line=False)))
    | {"EP exchange in line": lambda sizes: _trained(sizes, _Exchanging(sizes, _sent, in_line=True))},
}


def _calls(owner: Any, name: str, before: Callable[[Any], object], after: Any = None) -> AbstractContextManager[object]:
    """Let a function call others with its first argument."""
    original = getattr(owner, name)

    def replacement(one: Any, *args: Any, **given: Any) -> Any:
        before(one)
        found = original(one, *args, **given)
        if after:
            after(one)
        return found

    return patch.object(owner, name, replacement)


@contextmanager
def planted(loss: str, device: torch.device) -> Iterator[None]:
    """Lose overlap within FSDP or in each linear layer of the program that runs; else do nothing."""
    module, total = torch.get_device_module(device), torch.zeros(1024, device=device)
    current = module.current_stream

    def nothing(_: object) -> None:
        pass

    def waits(one: Any) -> None:
        current().wait_stream(one.comm_ctx.reduce_scatter_stream)

    def on_compute(name: str) -> Callable[[object], None]:
        return lambda one: setattr(one, name, current())

    def in_each(call: Callable[[], object], register: Any = register_module_forward_pre_hook) -> Any:
        return register(lambda one, _: (isinstance(one, nn.Linear) and call(), None)[1])

    found: dict[str, Any] = {
        "no prefetch in forward": lambda: [
            _calls(FSDPParamGroup, "pre_forward", lambda one: one.comm_ctx.all_gather_stream.wait_stream(current()))
        ],
        "no prefetch in backward": lambda: [patch.object(FSDPParamGroup, "_backward_prefetch", nothing)],
        "gathers on the compute stream": lambda: [
            patch.object(FSDPCommContext, "get_all_gather_streams", lambda *_: (current(), current())),
            _calls(fsdp1, "_init_streams", nothing, on_compute("_unshard_stream")),
        ],
        "reduce-scatters on the compute stream": lambda: [
            _calls(FSDPCommContext, "lazy_init", nothing, on_compute("reduce_scatter_stream")),
            _calls(fsdp1, "_init_streams", nothing, on_compute("_post_backward_stream")),
        ],
        "an extra wait": lambda: [
            _calls(
                FSDPParamGroup, "pre_backward", lambda one: current().wait_stream(one.comm_ctx.reduce_scatter_stream)
            )
        ],
        "an all-reduce in each layer": lambda: [in_each(lambda: dist.all_reduce(total))],
        "a host wait": lambda: [
            in_each(lambda: module.synchronize()),
            in_each(lambda: module.synchronize(), register_module_full_backward_pre_hook),
        ],
        "a value read in each layer": lambda: [in_each(lambda: total[0].item())],
    }
    with ExitStack() as kept:
        for one in found.get(loss, list)():
            kept.enter_context(one)
        yield


def graph_of(program: str, change: str, sizes: Sizes) -> StepGraph:
    """Return the graph of the fourth step of a program."""
    torch.manual_seed(0)
    with planted(change, sizes.device):
        model, step = PROGRAMS[program][change](sizes)
        counter = StepCounter(sizes.device)
        for number in range(4):
            with counter.step() if number == 3 else nullcontext():
                step()
                model.zero_grad()
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


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of ranks; equal values share the mean of theirs."""
    ranks = [
        [sum(other < one for other in side) + side.count(one) / 2 for one in side]
        for side in map(list, (first, second))
    ]
    return correlation(*ranks)


def _large(device: torch.device) -> Sizes:
    """Return sizes whose compute can hide communication; on CPU, such tensors have no data, but those of a mesh."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"mp_policy": policy, "mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    return Sizes(device, layers=8, dim=8192, tokens=4096, fsdp2=options)


def _measure(program: str, change: str, sizes: Sizes) -> tuple[Schedule, StepGraph, float, float]:
    """Return the schedule of a program's graph and the graph, and overlap and step in ms as this rank measured them."""
    graph = graph_of(program, change, sizes)
    torch.manual_seed(0)
    with planted(change, sizes.device):
        model, step = PROGRAMS[program][change](sizes)

        def whole() -> None:
            step()
            model.zero_grad()

        whole()
        profile = capture_overlap(whole, 4, sizes.device)
    metrics = profile.metrics()
    overlap = metrics.get("overlap_ratio", metrics.get("overlap_ratio_as_run", 0.0))
    return play(graph), graph, overlap, median(step.step_ms for step in profile.steps)


def _beside_measured(programs: Sequence[str], sizes: Sizes) -> None:
    """Print a table of the changes of programs, and the correlations of the schedules with what was measured."""
    rows = []
    print(
        "| program, change | graph | serialized | scheduled overlap, step | measured overlap, step |\n"
        + "| --- " * 5
        + "|"
    )
    for program in programs:
        # Activations in bfloat16, as FSDP2 casts them.
        kept = sizes if program.startswith("FSDP2") else replace(sizes, dtype=torch.bfloat16)
        for change in PROGRAMS[program]:
            played, graph, overlap, step_ms = _measure(program, change, kept)
            rows.append((played.overlap_ratio, overlap, played.step_ms, step_ms))
            counts = f"{played.serialized} of {played.collectives}"
            print(
                f"| {program}, {change or 'unchanged'} | {related(graph)} | {counts} | "
                f"{played.overlap_ratio:.3f}, {played.step_ms:.1f} ms | {overlap:.3f}, {step_ms:.1f} ms |",
                flush=True,
            )
            gc.collect()
    scheduled, measured, step, took = zip(*rows, strict=True)
    print(f"Spearman of {len(rows)}: overlap {spearman(scheduled, measured):.2f}, step {spearman(step, took):.2f}")


def _cost(program: str, pairs: int = 40) -> None:
    """Print the processor time that marks add to a counted step, and that the graph adds to reading its trace."""
    torch.set_num_threads(1)
    model, step = PROGRAMS[program][""](Sizes(torch.device("cpu")))
    marked = torch.cpu, torch.cpu.Stream, torch.cpu.Event, torch.cpu.StreamContext, dist.ProcessGroup, dist.Work
    unmarked = [dict(vars(one)) for one in marked]
    took: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for number in range(2 * pairs):
        counter = StepCounter(torch.device("cpu"))
        counter.begin(locates=bool(number % 2))
        moments = [time.process_time_ns()]
        step()
        moments.append(time.process_time_ns())
        counter.end()
        model.zero_grad()
        moments.append(time.process_time_ns())
        counter.costs()
        took["the step", bool(number % 2)].append((moments[1] - moments[0]) / 1e6)
        took["reading", bool(number % 2)].append((time.process_time_ns() - moments[2]) / 1e6)
        assert unmarked == [dict(vars(one)) for one in marked]
    # Beside other work, the least of many times is the one that repeats.
    for (what, with_graph), times in sorted(took.items()):
        text = f"{program}, {what} {'with' if with_graph else 'without'} the graph"
        print(f"{text}: {min(times):.1f} ms, median {median(times):.1f}", flush=True)


def train(program: str, change: str) -> None:
    """Train a program as a script that knows nothing of pytest-aorta."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_large = program.startswith("FSDP2")
    sizes = _large(torch.device("cpu")) if is_large else Sizes(torch.device("cpu"))
    with without_data() if is_large else nullcontext():
        model, step = PROGRAMS[program].get(change, PROGRAMS[program][""])(sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(8):
            step()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def main() -> None:
    """Print a line for each program and change, or a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--train", choices=PROGRAMS, metavar="PROGRAM")
    # A simulated rank can't have a stage without a plan of the launch.
    parser.add_argument("programs", nargs="*", default=[name for name in PROGRAMS if name != "PP"], metavar="PROGRAM")
    given = parser.parse_args()
    if given.train:
        train(given.train, os.environ.get("LOSS", ""))
        return
    if given.measured:
        device = RankEnv.read().join("graphs")
        with redirect_stdout(None if dist.get_rank() else sys.stdout):
            _beside_measured(given.programs, _large(device) if device.type == "cuda" else Sizes(device))
        dist.destroy_process_group()
        return
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(given.ranks)}
    simulate_world()
    # There is no plan that says so.
    collectives.is_simulated = lambda: True  # type: ignore[attr-defined]
    dist.init_process_group("gloo" if given.device == "cpu" else "nccl")
    for program in given.programs if given.cost else ():
        _cost(program)
    if given.cost:
        return
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    for program in given.programs:
        for change in PROGRAMS[program]:
            graph = graph_of(program, change, Sizes(device))
            played = play(graph)
            print(
                f"{program}, {change or 'unchanged'}: {related(graph)}, {played.serialized} of {played.collectives} "
                f"serialized, overlap {played.overlap_ratio:.3f}, streams {', '.join(graph.streams)}"
                f"{'; not seen: ' if graph.unseen else ''}{', '.join(graph.unseen)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
