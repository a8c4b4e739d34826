"""Code that training loops of workloads share: the choice of hashed steps, and the result of the measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_aorta.worker import RankResult, StepTimer, Workload, environment_facts, is_simulated, peak_memory

from .gradients import whole_norm


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps in order; losses and norms stay on the device until all steps are done.

    Attributes:
        elapsed_sec: wall time of all steps.
        losses: this rank's part of each step's global loss.
        grad_norms: the norm of each step's gradients over all ranks, as a plain tensor or a DTensor.
    """

    timer: StepTimer
    elapsed_sec: float
    losses: list[torch.Tensor]
    grad_norms: list[torch.Tensor]

    def result(self, steps: int, device: torch.device, *, any_cpu: bool) -> RankResult:
        """Return the result of these steps without metrics and hashes; collective.

        Args:
            steps: measured steps that the config asks for.
            device: the device that the steps ran on.
            any_cpu: whether CPU ranks compute the same bits on CPUs of every vendor, as for
                :func:`~pytest_aorta.worker.environment_facts`.
        """
        # NCCL's record of the steps is read first, before further collectives push entries out.
        step_times_ms, collective_ms = self.timer.step_times_ms(), self.timer.collective_ms()
        return RankResult(
            passed=True,
            failure_count=0,
            configured_iterations=steps,
            total_iterations=len(step_times_ms),
            step_times_ms=step_times_ms,
            elapsed_sec=self.elapsed_sec,
            loss=[] if is_simulated() else _sum_over_ranks(self.losses),
            grad_norm=[] if is_simulated() else [float(whole_norm(norm)) for norm in self.grad_norms],
            environment=environment_facts(device, any_cpu=any_cpu),
            collective_ms=collective_ms,
            memory_bytes=self.timer.memory_bytes(),
        )


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
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [float(loss) for loss in summed.tolist()]
