"""Exchange of collectives' calls between two real ranks with gloo."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pytest_aorta.result.measurements import CollectiveCalls
from pytest_aorta.result.trace.transfers import waits_ms
from pytest_aorta.worker.overlap.exchange import calls_of_all_ranks, largest_over_ranks

CPU = torch.device("cpu")
GATHERS = [CollectiveCalls("all_gather", "0 [0, 1]", 2, 1 << 20, [5.0, 1.0])]
# The ranks of a pipeline make unequal calls, and their texts differ in length.
OF_RANKS = [
    GATHERS,
    [
        CollectiveCalls("all_gather", "0 [0, 1]", 2, 1 << 20, [1.5, 4.25]),
        CollectiveCalls("send_recv", "1 \N{GREEK SMALL LETTER ALPHA}", None, None, [0.1]),
    ],
]


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert calls_of_all_ranks(OF_RANKS[rank], CPU) == OF_RANKS
    assert calls_of_all_ranks([], CPU) == [[], []]
    assert largest_over_ranks([rank, -rank], CPU) == [1.0, 0.0]
    found = waits_ms(calls_of_all_ranks(OF_RANKS[rank], CPU), rank)
    assert found == {GATHERS[0].key: [[3.5, 0.0], [0.0, 3.25]][rank]}
    dist.destroy_process_group()
    Path(folder, f"{rank}.passed").touch()


def test_every_rank_gets_the_calls_of_all(tmp_path):
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    assert sorted(path.name for path in tmp_path.glob("*.passed")) == ["0.passed", "1.passed"]


def test_rank_without_a_process_group_has_its_own_calls_alone():
    assert calls_of_all_ranks(GATHERS, CPU) == [GATHERS]
    assert largest_over_ranks([2.0], CPU) == [2.0]
