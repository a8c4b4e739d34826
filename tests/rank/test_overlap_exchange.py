"""Exchange of collectives' calls between two real ranks with gloo, and captures that need it."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pytest_aorta.result.trace import kineto as reading
from pytest_aorta.result.trace.profiled_steps import CollectiveCalls, waits_ms
from pytest_aorta.worker import overlap as profile
from pytest_aorta.worker.overlap import _calls_of_all_ranks, _largest_over_ranks, _Pass
from tests.rank.ranks import run_two_ranks
from tests.unit.kineto_traces import boundary, kernel, trace

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CALL = {
    "Collective name": "_allgather_base",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
    "Group size": 2,
    "In msg nelems": 1024,
    "Out msg nelems": 2048,
    "dtype": "BFloat16",
}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GATHERS = [CollectiveCalls("all_gather", "0 [0, 1]", 2, 1 << 20, [5.0, 1.0])]
# The ranks of a pipeline make unequal calls, and their texts differ in length.
OF_RANKS = [
    GATHERS,
    [
        CollectiveCalls("all_gather", "0 [0, 1]", 2, 1 << 20, [1.5, 4.25]),
        CollectiveCalls("send_recv", "1 \N{GREEK SMALL LETTER ALPHA}", None, None, [0.1]),
    ],
]


def exchange(rank: int) -> None:
    """Exchange calls of unequal lengths."""
    assert _calls_of_all_ranks(OF_RANKS[rank], CPU) == OF_RANKS
    # A script may compute on another device than that of its process group.
    assert _calls_of_all_ranks(OF_RANKS[rank], torch.device("meta")) == OF_RANKS
    assert _calls_of_all_ranks([], CPU) == [[], []]
    assert _largest_over_ranks([rank, -rank], CPU) == [1.0, 0.0]
    found = waits_ms(_calls_of_all_ranks(OF_RANKS[rank], CPU), rank)
    assert found == {GATHERS[0].key: [[3.5, 0.0], [0.0, 3.25]][rank]}


def device_trace(edges: tuple[int, ...], early_us: float) -> dict:
    """Return steps between ``edges`` in us, each with a gather of 10 us, half hidden, after a wait of ``early_us``."""
    steps = [
        [kernel("gemm", edge + 5, 60), kernel(GATHER, edge + 60 - early_us, 10 + early_us, stream=20, **CALL)]
        for edge in edges[:-1]
    ]
    marks = [boundary(place, place + 1, edge) for place, edge in enumerate(edges)]
    return trace(*marks, *steps)


def capture(rank: int) -> None:
    """Capture steps of recorded kernels; rank 0 arrives early at every gather."""
    early_us = 0.0 if rank else 25.0
    first, two_steps = device_trace((100, 200), early_us), device_trace((100, 200, 300), early_us)
    profiled = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(json.dumps(two_steps)))
    with patch.object(profile, "_profile", return_value=(profiled, _Pass(1.0, 2.0))):
        found = profile._capture_ahead(lambda: None, 2, CPU, first, timed_ms=0.1)
    assert found.head_start.succeeded
    for steps in (found.steps, found.as_run):
        assert [(round(step.comm_ms, 6), round(step.hidden_comm_ms, 6)) for step in steps] == [(0.010, 0.005)] * 2
    assert found.metrics() == {
        "exposed_comm_ms": pytest.approx(0.005),
        "overlap_ratio": pytest.approx(0.5),
        "device_idle_ms": pytest.approx(0.034, abs=0.001),
    }
    assert [len(calls.ms) for calls in found.collectives] == [2]
    assert found.collectives[0].ms[0] == pytest.approx(0.010 + early_us / 1e3)


def overflow(rank: int) -> None:
    """Capture steps whose trace is too large on rank 1 alone: first that of one step, then that of the second pass."""
    for large in (0, 2):
        texts = [json.dumps(device_trace((100, 200), 0.0)), *[json.dumps(device_trace((100, 200, 300), 0.0))] * 3]
        if rank:
            texts[large] = texts[large].ljust(30_000)
        given = [
            (SimpleNamespace(export_chrome_trace=lambda path, text=text: Path(path).write_text(text)), _Pass(1.0, 2.0))
            for text in texts
        ]
        with (
            patch.object(profile, "_profile", side_effect=given),
            patch.object(reading, "MAX_TRACE_BYTES", 29_999),
            pytest.warns(UserWarning, match="overlap is not measured: the trace of"),
        ):
            found = profile.capture_overlap(lambda: None, 2, GPU)
        assert (found.steps, found.metrics()) == ([], {})
        traced, remedy = ("2 profiled steps", "lower profile_steps") if large else ("one profiled step", "set")
        assert found.problem.startswith(
            f"the trace of {traced} has 30,000 bytes on the largest rank, and at most 29,999 are read; {remedy}"
        )


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for task in (exchange, capture, overflow):
        task(rank)
        Path(folder, f"{task.__name__}.{rank}").touch()
    dist.destroy_process_group()


def test_ranks_exchange_their_calls_and_capture_together(tmp_path):
    """Run all tasks in one pair of ranks, since starting the ranks takes longest."""
    run_two_ranks(run, str(tmp_path))
    passed = sorted(path.name for path in tmp_path.glob("*.[01]"))
    assert passed == ["capture.0", "capture.1", "exchange.0", "exchange.1", "overflow.0", "overflow.1"]


def test_rank_without_a_process_group_has_its_own_calls_alone():
    assert _calls_of_all_ranks(GATHERS, CPU) == [GATHERS]
    assert _largest_over_ranks([2.0], CPU) == [2.0]
