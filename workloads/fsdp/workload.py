"""The lifecycle of the ``fsdp`` workload."""

from collections.abc import Iterable
from itertools import count

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pytest_aorta.worker import (
    LocalShard,
    RankEnv,
    RankResult,
    StepTimer,
    environment_facts,
    hash_shards,
    measure,
    profiled,
)

from .. import checkpoint
from ..common.result import GroupWorkload, peak_memory_metrics
from .buffers import Buffers
from .faults import FaultyStep
from .oracle import CodeTable
from .settings import Settings
from .verification import Verification

_GEMMS_PER_LAYER = 3


def fsdp_metrics(settings: Settings, device_time_s: float) -> dict[str, float]:
    """Return the metrics of all measured steps, which took ``device_time_s`` together."""
    gemm_flops = 2 * settings.gemm_size**3 * _GEMMS_PER_LAYER * settings.layers * settings.steps
    return {
        "gemm_throughput_tflops": gemm_flops / device_time_s / 1e12,
        "h2d_bytes_per_step": float(settings.h2d_tensor_size * settings.dtype.itemsize),
    }


class FsdpWorkload(GroupWorkload):
    """FSDP's all-gathers, GEMMs and reduce-scatters as explicit calls, on data that identifies its origin.

    Steps run in three phases that differ only in their checks and timing: warm-up, checked, measured.
    """

    def setup(self) -> None:
        """Join the process group, check the config and allocate every buffer.

        Raises:
            ValueError: Config keys contradict each other.
        """
        env = RankEnv.read()
        self._device = env.join("fsdp")
        settings = self._settings = Settings.read(self.config, env.rank, env.world_size)
        buffers = self.buffers = Buffers(settings, self._device)
        self._weight_hashes, self._trained = dict[str, str](), 0
        if settings.load_checkpoint is not None:
            self._trained = checkpoint.load(settings.load_checkpoint, self._state(0))
            settings.check_steps(self._trained)
        codes = CodeTable(settings.dtype, self._device, settings.seed)
        self._verification = Verification(settings, codes, buffers.index, buffers.input_index)
        self._step = FaultyStep(settings, buffers, codes, self._verification)
        self._verification.rehearse()

    def run(self) -> RankResult:
        """Warm up, check and measure; then read the checks, hash the weights and profile further steps."""
        settings = self._settings
        first = settings.warmup + settings.verify
        for iteration in range(first):
            self._step.run(self._trained + iteration)

        def run_step(number: int, timer: StepTimer) -> None:
            with timer.step():
                self._step.run(self._trained + first + number)
            if settings.hash_every and (number + 1) % settings.hash_every == 0:
                self._hash_weights(first + number + 1)

        timer, elapsed_sec = measure(run_step, settings.steps, self._device)
        result = timer.result(elapsed_sec).replace(configured_iterations=settings.steps)
        metrics = fsdp_metrics(settings, sum(result.step_times_ms) / 1e3) | peak_memory_metrics(self._device)
        self._hash_weights(settings.iterations)
        failure_count, failures = self._verification.failures()
        result = result.replace(
            passed=failure_count == 0,
            failure_count=failure_count,
            failures=failures,
            metrics=metrics,
            weight_hashes=self._weight_hashes,
            # Sums of integers below 2**24 are exact in any order.
            environment=environment_facts(self._device, bitwise_reproducible=True, any_cpu=True),
        )
        trained = self._trained + settings.iterations
        iterations = count(trained)
        with checkpoint.saving(settings.save_checkpoint, lambda: self._state(trained), is_async=settings.async_save):
            return profiled(result, lambda: self._step.run(next(iterations)), settings.profile_steps, self._device)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return this rank's shard of each layer's weights; there are none without an optimizer."""
        return ((f"layers.{layer}.weight", weight) for layer, weight in enumerate(self.buffers.weights))

    def _state(self, trained: int) -> dict[str, torch.Tensor]:
        """Return the weights that ``trained`` steps made, as shards of one tensor a layer, and this number."""
        mesh = init_device_mesh(self._device.type, (self._settings.world_size,))
        shards = {name: DTensor.from_local(shard, mesh, [Shard(0)]) for name, shard in self.named_parameters()}
        return {**shards, "optimizer.step": torch.tensor(trained)}

    def _hash_weights(self, step: int) -> None:
        """Hash the weights after ``step``, counted from the first one of the warm-up."""
        settings = self._settings
        if not self.buffers.weights:
            return
        if step == settings.iterations:
            self._step.end()
        ranks, rank = settings.world_size, settings.rank
        shards = [LocalShard(name, (ranks * len(own),), own, rank * len(own)) for name, own in self.named_parameters()]
        self._weight_hashes[str(step)] = hash_shards(shards).hex
