"""The parts of a result and of the lifecycle that workloads share."""

import torch
import torch.distributed as dist

from pytest_aorta.worker import RankResult, StepTimer, Workload, peak_memory


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


def peak_memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the metric ``peak_memory_bytes``; empty on CPU."""
    peak = peak_memory(device)
    return {} if peak is None else {"peak_memory_bytes": float(peak)}


class GroupWorkload(Workload):
    """A workload that owns nothing outside of its attributes and the process group."""

    def cleanup(self) -> None:
        """Drop everything that the workload holds, and leave the process group."""
        # A group that an object still holds does not end.
        vars(self).clear()
        if dist.is_initialized():
            dist.destroy_process_group()
