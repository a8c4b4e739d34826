"""Flipped bits in every kernel that inductor generated for a step, and the operators that are named instead.

Run: torchrun --nproc-per-node 2 benchmarks/numerics/inductor_kernels.py

A kernel is no operator and is not captured. So the first operator that reads the value has to be named, without the
claim that it computed the value.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from aorta_workloads.common.faults import flip
from aorta_workloads.common.gradients import own_shard
from aorta_workloads.llama_simple_fsdp import LlamaSimpleFsdpWorkload
from torch._inductor.codecache import PyCodeCache

from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.result.trace.rank_files import OperatorCall
from pytest_aorta.verdict.bitwise import Evidence, first_operators
from pytest_aorta.worker import OperatorCapture

CONFIG = {"backend": "inductor", "steps": 1, "warmup": 0, "profile_steps": 0}
Calls = dict[int, list[OperatorCall]]


class Kernels:
    """The generated kernels of this process.

    Attributes:
        num_calls: the number of calls in the step.
        num_before: the number of operators that were captured before the chosen call.
    """

    def __init__(self, capture: OperatorCapture) -> None:
        """Wrap every kernel of the loaded modules of generated code."""
        self._capture, self._chosen = capture, 0
        self.num_calls = self.num_before = 0
        for module in PyCodeCache.modules:
            for name in [name for name in vars(module) if name.startswith("cpp_fused")]:
                setattr(module, name, self._wrapped(getattr(module, name)))

    def choose(self, call: int) -> None:
        """Choose the call of the next step, counted from 1, that writes a flipped bit; 0 is none."""
        self.num_calls, self._chosen = 0, call

    def _wrapped(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            self.num_calls += 1
            if self.num_calls != self._chosen:
                kernel(*args)
                return
            with OperatorCapture.paused():
                self.num_before = len(self._capture.calls())
                tensors = [value for value in args if isinstance(value, torch.Tensor)]
                before = [tensor.clone() for tensor in tensors]
                kernel(*args)
                written = [tensor for tensor, old in zip(tensors, before, strict=True) if not torch.equal(tensor, old)]
                flip([random.Random(self._chosen).choice(written)], is_nan=False)

        return run


class Steps:
    """The second step of a workload, again and again from the same state."""

    def __init__(self) -> None:
        """Train one step, which compiles, and keep the state after it."""
        self._workload = LlamaSimpleFsdpWorkload(resolve_config(find_workload("llama_simple_fsdp", []), CONFIG))
        self._workload.setup()
        self._batch = next(self._workload.batches)
        self._workload.train_step(self._batch)
        model, optimizer = self._workload.model, self._workload.optimizer
        kept = [
            value for parameter in model.parameters() for value in (parameter, *optimizer.state[parameter].values())
        ]
        self._state = [own_shard(value.detach()) for value in kept]
        self._saved = [tensor.clone() for tensor in self._state]
        self.capture = OperatorCapture(model)
        self.kernels = Kernels(self.capture)

    def run(self, call: int) -> tuple[Calls, list[list[bytes]], int]:
        """Return the operators and the weights of each rank, and how many of its operators ran before the flip."""
        for tensor, saved in zip(self._state, self._saved, strict=True):
            tensor.copy_(saved)
        self.kernels.choose(call)
        self.capture.begin(1)
        self._workload.train_step(self._batch)
        self.capture.end()
        weights = [tensor.numpy().tobytes() for tensor in self._state]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.capture.calls(), weights, self.kernels.num_before))
        calls, every, before = zip(*found, strict=True)
        return dict(enumerate(calls)), list(every), max(before)


def main() -> None:
    """Flip a bit in each call of a kernel, and print how the first operator that differs is named."""
    steps = Steps()
    reference, weights, _ = steps.run(0)
    rank, outcomes = dist.get_rank(), Counter[str]()
    for call in range(1, steps.kernels.num_calls + 1):
        ranks = list(reference) if call % 4 == 3 else [call % len(reference)]
        calls, changed, num_before = steps.run(call if rank in ranks else 0)
        first = next(iter(first_operators(calls, reference)), None)
        if first is None:
            outcomes["masked" if changed == weights else "not named"] += 1
            continue
        position = next(number for number, one in enumerate(calls[first.rank]) if one is first.call)
        is_sure = first.evidence in (Evidence.COMPUTED, Evidence.RECEIVED)
        is_right = not is_sure and first.rank in ranks and position >= num_before
        outcomes["right" if is_right else "wrong"] += 1
        if rank == 0:
            print(f"call {call} on ranks {ranks}: {first.call.name} on rank {first.rank}: {first.explanation}")
    if rank == 0:
        print(dict(outcomes))
    dist.destroy_process_group()


main()
