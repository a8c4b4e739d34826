"""The rank that computes more waits less: two real ranks with gloo."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pytest_aorta.result.facts import rank_lags_ms
from pytest_aorta.worker import Delay, StepTimer

STEPS, SLOW_RANK, DELAY_MS = 15, 1, 30.0


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    timer, delay = StepTimer(torch.device("cpu")), Delay(torch.device("cpu"), DELAY_MS if rank == SLOW_RANK else 0)
    gradient = torch.ones(1024)
    for _ in range(STEPS):
        with timer.step():
            delay()
            dist.all_reduce(gradient, dist.ReduceOp.MAX)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(timer.wait_ms()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def test_rank_that_computes_more_waits_less(tmp_path):
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    waits_ms = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(waits) for waits in waits_ms] == [STEPS, STEPS]
    lags_ms = rank_lags_ms(waits_ms)
    assert max(range(2), key=lambda rank: lags_ms[rank]) == SLOW_RANK
    # Less than the delay if other processes use the cores too.
    assert lags_ms[SLOW_RANK] > DELAY_MS / 4
