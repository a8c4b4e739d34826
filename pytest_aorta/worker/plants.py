"""Faults that ``aorta selftest`` plants into a rank, through public hooks and functions of torch alone."""

import atexit
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from pytest_aorta.common.clock import time
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.worker.accelerator import device_kind, own_device
from pytest_aorta.worker.finite import untraced
from pytest_aorta.worker.layout import local_part
from pytest_aorta.worker.replacing import replace

# The optimizer's step that a fault of one step falls into: training has begun, and short runs have it too.
_STEP = 2
_EXIT_CODE = 3
# Functions of torch.distributed that FSDP, and scripts, communicate by; torch 2.13 has added those ending in _single.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# What has to stay alive as long as the rank.
_kept: list[object] = []


def plant(planted: Planted) -> None:
    """Plant the fault into what runs next in this process: a workload or a script."""
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if planted.plant is Plant.IN_LINE:
        _communicate_in_line(planted)
    elif planted.plant is Plant.MEMORY:
        _hold(planted)
    elif planted.plant is Plant.SAME_SAMPLES:
        _share_samples(planted)
    elif is_last and planted.plant is Plant.EXIT_CODE:
        atexit.register(_exit, planted)
    elif is_last or planted.plant in (Plant.SUMMED, Plant.RATE):
        _watch_steps(planted)


def _exit(planted: Planted) -> None:
    planted.mark.touch()
    os._exit(_EXIT_CODE)


def _hold(planted: Planted) -> None:
    if (kind := device_kind()) is not DeviceKind.CPU:
        # The script has not chosen this rank's device yet.
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
        _kept.append(torch.zeros(int(planted.size), dtype=torch.uint8, device=torch.device(kind, index)))
        planted.mark.touch()


def _watch_steps(planted: Planted) -> None:
    """Plant what happens in a step: before the optimizer uses the gradients, or as they are computed."""
    steps, chosen, ranks = 0, None, int(os.environ["WORLD_SIZE"])

    def before_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        nonlocal steps
        steps += 1
        if planted.plant is Plant.SLOW_RANK:
            planted.mark.touch()
            time.sleep(planted.size / 1000)
        elif steps == 1 and planted.plant is Plant.RATE:
            planted.mark.touch()
            for group in optimizer.param_groups:
                group["lr"] *= ranks
        elif steps == _STEP and planted.plant is Plant.HANG:
            planted.mark.touch()
            while True:
                time.sleep(60)
        elif steps == _STEP and planted.plant is Plant.BIT and _flip_bit(optimizer):
            planted.mark.touch()

    register_optimizer_step_pre_hook(untraced(before_step))
    factors = {Plant.LOST_GRADIENT: 0.0, Plant.NAN: math.nan, Plant.SUMMED: float(ranks)}
    if planted.plant not in factors:
        return
    factor = factors[planted.plant]

    def changed(
        backward: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any
    ) -> None:
        nonlocal chosen
        # Where optimizers step within a backward pass, several have stepped before the second pass begins.
        if chosen is None and steps >= _STEP - 1:
            chosen = steps
        if steps == chosen or planted.plant is Plant.SUMMED:
            planted.mark.touch()
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or ())
            given += [None] * (len(roots) - len(given))
            pairs = zip(roots, given, strict=True)
            grad_tensors = [factor * (torch.ones_like(root) if own is None else own) for root, own in pairs]
        backward(tensors, grad_tensors, *args, **keywords)

    replace(torch.autograd, "backward", changed)


def _share_samples(planted: Planted) -> None:
    """Give each rank the samples of rank 0."""

    def constructed(construct: Callable[..., None], sampler: Any, *args: Any, **keywords: Any) -> None:
        construct(sampler, *args, **keywords)
        sampler.rank = 0
        planted.mark.touch()

    replace(DistributedSampler, "__init__", constructed)


def _flip_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Flip the highest bit of the fraction of one gradient's largest element; return whether there is one."""
    grads = [part.grad for group in optimizer.param_groups for part in group["params"] if part.grad is not None]
    parts = [part for grad in grads if (part := local_part(grad.detach())).numel() and part.dtype in _INTEGERS]
    if not parts:
        return False
    largest = max(parts, key=lambda part: float(part.abs().max()))
    place = torch.unravel_index(largest.abs().argmax(), largest.shape)
    integer = _INTEGERS[largest.dtype]
    bit = round(-math.log2(torch.finfo(largest.dtype).eps)) - 1
    largest[place] = (largest[place].view(integer) ^ (1 << bit)).view(largest.dtype)
    return True


def _communicate_in_line(planted: Planted) -> None:
    """Make compute wait for each collective that is called from Python, and for the buckets of DDP."""

    def in_line(request: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        work = request(*args, **keywords)
        if work is not None:
            work.wait()
        # A counted step hears of the wait from the device's own function, that of torch.cpu included.
        torch.get_device_module(device := own_device()).synchronize(device)
        planted.mark.touch()
        return work

    def constructed(construct: Callable[..., None], model: Any, *args: Any, **keywords: Any) -> None:
        construct(model, *args, **keywords)
        # DDP refuses annotations that are text.
        model.register_comm_hook(None, lambda _state, bucket: _reduce_in_line(bucket))

    for name in _COLLECTIVES:
        if hasattr(dist, name):
            replace(dist, name, in_line)
    replace(DistributedDataParallel, "__init__", constructed)


def _reduce_in_line(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket over all ranks, after waiting for it."""
    reduced = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(reduced)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future
