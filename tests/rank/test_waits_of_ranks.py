"""The rank that arrives last waits least: two real ranks with gloo."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from pytest_aorta.common import variables
from pytest_aorta.result.facts import rank_lags_ms
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.rank_files import flight_records, read_arrivals, waits_of_ranks_ms
from pytest_aorta.worker import StepTimer
from pytest_aorta.worker.profiling import ScriptProfiler
from tests.rank.ranks import run_two_ranks

# One in twenty would end too early.
PROFILES = 100
STEPS, SLOW_RANK, DELAY_MS = 15, 1, 30.0


def run(rank: int, folder: str, records: str) -> None:
    own = Path(folder, str(rank))
    own.mkdir()
    os.environ |= {variables.RANK_FOLDER: str(own), "TORCH_FR_BUFFER_SIZE": records}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    timer, gradient = StepTimer(torch.device("cpu")), torch.ones(1024)
    for _ in range(STEPS):
        with timer.step():
            if rank == SLOW_RANK:
                time.sleep(DELAY_MS / 1e3)
            dist.all_reduce(gradient, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    # Scripts leave the process group before their measurements are read.
    assert timer.collective_ms() == []


def profile_collectives(rank: int, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    end, were_left = profile.__exit__, []

    def checked(profiler: profile, *error: object) -> None:
        were_left.append(all(entry["retired"] for entry in flight_records("fr") or [{"retired": False}]))
        end(profiler, *error)

    profile.__exit__ = checked
    for _ in range(PROFILES):
        profiler = ScriptProfiler(torch.device("cpu"))
        profiler.start()
        # As DDP waits; a work's own wait is for the end of its thread, too.
        dist.all_reduce(torch.ones(8), async_op=True).get_future().wait()
        profiler.stop()
    dist.destroy_process_group()
    assert were_left == [True] * PROFILES


def test_profiler_ends_after_the_threads_of_collectives_have_told_it(tmp_path):
    run_two_ranks(profile_collectives, str(tmp_path))


def waits_ms(folder: Path, records: str) -> list[list[float]]:
    run_two_ranks(run, str(folder), records)
    return waits_of_ranks_ms([read_arrivals(folder / str(rank) / ARRIVALS_FILE) for rank in range(2)])


def test_rank_that_arrives_late_waits_less(tmp_path):
    found = waits_ms(tmp_path, "20000")
    assert [len(waits) for waits in found] == [STEPS, STEPS]
    lags_ms = rank_lags_ms(found)
    assert max(range(2), key=lambda rank: lags_ms[rank]) == SLOW_RANK
    # Less than the delay if other processes use the cores too.
    assert lags_ms[SLOW_RANK] > DELAY_MS / 4


def test_short_record_covers_the_last_steps_only(tmp_path):
    found = waits_ms(tmp_path, "8")
    assert len(found[0]) == len(found[1])
    assert 0 < len(found[0]) < STEPS
