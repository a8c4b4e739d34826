"""Decides on activation checkpointing where ranks have different budgets, and where steps need different memory.

Metrics are the numbers of blocks that this rank recomputes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from aorta_workloads.distributed.activation_checkpoint import LADDER
from aorta_workloads.distributed.memory import Activations, StepMemory, Unit, decide

from pytest_aorta.worker import recorder

NUM_BLOCKS = 4
CPU = torch.device("cpu")


def step_memory(kept: int) -> StepMemory:
    """Return a step whose blocks keep ``kept`` bytes under the first kind, and none under the others."""
    return StepMemory(
        embedding=Unit(),
        block=Unit(),
        head=Unit(),
        blocks=range(NUM_BLOCKS),
        inputs=0,
        by_kind={kind: Activations(kept if kind == LADDER[0] else 0, 0) for kind in LADDER},
        loss=Activations(0, 0),
    )


def num_recomputed(kept: int, budget: int) -> float:
    """Return how many blocks this rank recomputes."""
    kinds = decide(step_memory(kept), NUM_BLOCKS, budget, CPU).kinds
    return float(sum(kind != LADDER[0] for kind in kinds))


dist.init_process_group("gloo")
rank = dist.get_rank()
with recorder.step():
    # The rank with less memory has room for one block.
    recorder.metric("by_free_memory", num_recomputed(100, 400 if rank == 0 else 100))
    # The rank that keeps more has room for two blocks.
    recorder.metric("by_need", num_recomputed(100 if rank == 0 else 200, 400))
dist.destroy_process_group()
