"""A workload with a race: rank 1 reads the result of a reduce-scatter that rank 0 enters later."""

import time

import torch
import torch.distributed as dist

from pytest_aorta.worker import (
    OperatorCapture,
    RankEnv,
    RankResult,
    StepTimer,
    Workload,
    environment_facts,
    hash_parameters,
)

LATE_S = 0.2


class Unwaited(Workload):
    """Gradient descent on a vector, of which each rank holds a part."""

    def setup(self) -> None:
        """Join the process group and make this rank's part of the vector."""
        self.env = RankEnv.read()
        self.device = self.env.join("unwaited")
        self.own = torch.linspace(-1, 1, 8, device=self.device) + self.env.rank
        self.capture = OperatorCapture(torch.nn.Linear(1, 1))

    def run(self) -> RankResult:
        """Run the steps."""
        timer, hashes = StepTimer(self.device), {}
        for step in range(1, self.config["steps"] + 1):
            if step == self.config["hash_operators_step"]:
                self.capture.begin(step)
            with timer.step():
                work = self.step(step)
            self.capture.end()
            work.wait()
            hashes[str(step)] = hash_parameters([("vector", self.whole())]).hex
        return timer.result(0.1).replace(weight_hashes=hashes, environment=environment_facts(self.device))

    def step(self, step: int) -> dist.Work:
        """Run one step, and return the work of the reduce-scatter."""
        gradient = torch.sin(self.whole() * (self.env.rank + 1))
        total = torch.zeros_like(self.own)
        if self.env.rank == 0:
            time.sleep(LATE_S)
        work = dist.reduce_scatter_tensor(total, gradient, async_op=True)
        first, last = self.config["unwaited_from"], self.config["unwaited_to"]
        if self.env.rank == 0 or first is None or not first <= step <= last:
            work.wait()
        self.own.sub_(total, alpha=0.1)
        return work

    def whole(self) -> torch.Tensor:
        """Return the vector."""
        parts = [torch.empty_like(self.own) for _ in range(self.env.world_size)]
        dist.all_gather(parts, self.own)
        return torch.cat(parts)

    def cleanup(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
