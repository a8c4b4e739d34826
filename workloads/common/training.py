"""Code that training loops of workloads share: the choice of hashed steps, and the result of the measured steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pytest_aorta.worker import RankResult, StepTimer, Workload, environment_facts, is_simulated, measure, peak_memory

from .compiled_adamw import CompiledAdamW
from .gradients import by_mesh, whole_norm


def measure_training(
    train: Callable[[int, StepTimer], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    device: torch.device,
    *,
    any_cpu: bool,
) -> RankResult:
    """Train measured steps and return their result without metrics and hashes; collective.

    Losses and norms stay on the device until all steps are done.

    Args:
        train: runs a step, counted from 1, in the timer; returns this rank's part of the global loss, and the norm of
            the gradients over all ranks, as a plain tensor or a DTensor.
        steps: number of steps.
        device: the device that the steps run on.
        any_cpu: whether CPU ranks compute the same bits on CPUs of every vendor, as for
            :func:`~pytest_aorta.worker.environment_facts`.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    timer, elapsed_sec = measure(lambda number, timer: found.append(train(number + 1, timer)), steps, device)
    result = timed_result(timer, elapsed_sec, steps)
    losses, norms = ([], []) if is_simulated() else map(list, zip(*found, strict=True))
    return result.replace(
        loss=_sum_over_ranks(losses),
        grad_norm=[float(whole_norm(norm)) for norm in norms],
        environment=environment_facts(device, any_cpu=any_cpu),
    )


def timed_result(timer: StepTimer, elapsed_sec: float, steps: int) -> RankResult:
    """Return the times and memory of the measured steps, of ``steps`` that the config asks for."""
    # NCCL's record of the steps is read before further collectives push entries out.
    step_times_ms, collective_ms = timer.step_times_ms(), timer.collective_ms()
    return RankResult(
        passed=True,
        failure_count=0,
        configured_iterations=steps,
        total_iterations=len(step_times_ms),
        step_times_ms=step_times_ms,
        elapsed_sec=elapsed_sec,
        collective_ms=collective_ms,
        memory_bytes=timer.memory_bytes(),
    )


def make_adamw(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, kind: str = "fused"
) -> torch.optim.AdamW:
    """Return AdamW for the parameters of ``model``, as one ``fused`` kernel, as many, or ``compiled``."""
    # Each mesh has a group of its own, because a kernel for many tensors accepts tensors of one mesh only.
    groups = [{"params": parameters} for parameters in by_mesh(model)]
    if kind == "compiled":
        return CompiledAdamW(groups, lr, betas, weight_decay=weight_decay)
    fused = kind == "fused"
    # On CPU the other kernels take square roots from MKL, which rounds them differently on another vendor's CPU.
    foreach = None if not fused and any(parameter.is_cuda for parameter in model.parameters()) else False
    return torch.optim.AdamW(groups, lr, betas, weight_decay=weight_decay, fused=fused, foreach=foreach)


def is_hashed(step: int, steps: int, hash_every: int) -> bool:
    """Return whether weights are hashed after measured step ``step``, counted from 1.

    The last of ``steps`` is always hashed; ``hash_every`` 0 adds no other steps.
    """
    return step == steps or (hash_every > 0 and step % hash_every == 0)


def peak_memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the metric ``peak_memory_bytes`` of an accelerator since the measured loop began; empty on CPU.

    Of tensors without data, the peak is an estimate of an accelerator's.
    """
    if (estimated := peak_memory()) is not None:
        return {"peak_memory_bytes": float(estimated)}
    if device.type == "cpu":
        return {}
    return {"peak_memory_bytes": float(torch.accelerator.max_memory_allocated(device))}


def leave_process_group(workload: Workload, *names: str) -> None:
    """Leave the process group and drop the attributes ``names``, not all of which exist after a failed setup."""
    if dist.is_initialized():
        dist.destroy_process_group()
    drop(workload, *names)


def drop(workload: Workload, *names: str) -> None:
    """Delete the attributes ``names`` of ``workload`` that exist."""
    for name in names:
        workload.__dict__.pop(name, None)


def _sum_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    if not losses:
        return []
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [float(loss) for loss in summed.tolist()]
