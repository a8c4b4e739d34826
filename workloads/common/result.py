"""The parts of a result and of the lifecycle that workloads share."""

import torch
import torch.distributed as dist

from pytest_aorta.worker import Workload, peak_memory


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
