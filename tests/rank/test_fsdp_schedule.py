"""The order of collectives, their waits and the use of their data in a step of the fsdp workload, without ranks."""

from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.common import streams
from aorta_workloads.common.streams import Stream, Work
from aorta_workloads.fsdp import schedule
from aorta_workloads.fsdp.buffers import Buffers
from aorta_workloads.fsdp.oracle import CodeTable
from aorta_workloads.fsdp.settings import Settings

from tests.rank.ranks import Requests, fake_group
from tests.rank.settings import default_config

CPU = torch.device("cpu")
SMALL = {"layers": 3, "gemm_size": 2, "fsdp_shard_size": 4, "h2d_tensor_size": 4}


@pytest.fixture
def events_of_a_step(monkeypatch):
    """Return a function that runs one step and returns its events as text, and the copied inputs.

    ``g0``, ``wg0`` and ``0`` are the start of layer 0's gather, the wait for it, and the use of its parameters; ``r0``
    and ``wr0`` are the start of the reduction of its gradients and the wait for it.
    """
    events, copied = [], []

    class LoggingStream(Stream):
        def submit(self, transfer):
            transfer(True)
            wait = f"w{events[-1]}"
            return Work(lambda: events.append(wait))

    def run(**changes):
        settings = Settings.read(default_config("fsdp", **SMALL | changes), rank=0, world_size=2)
        buffers = Buffers(settings, CPU)

        def log(name, tensors, _is_async):
            kind, number, shards = ("g", 1, buffers.shards) if "gather" in name else ("r", 0, buffers.reduced)
            events.extend(f"{kind}{layer}" for layer, shard in enumerate(shards) if shard is tensors[number])

        monkeypatch.setattr(streams, "GlooStream", LoggingStream)
        monkeypatch.setattr(
            schedule.TrainingStep, "_input_copy", lambda _, number: lambda _asynchronous: copied.append(number)
        )
        checks = SimpleNamespace(
            check_input=lambda *_: None,
            check_gathered=lambda _iteration, layer, *_: events.append(str(layer)),
            check_reduced=lambda *_: None,
        )
        codes = CodeTable(settings.dtype, CPU, 0)
        with fake_group(2), Requests(log):
            schedule.TrainingStep(settings, buffers, codes, checks).run(0)
        return " ".join(events), copied

    return run


BESIDE = "g0 g1 wg0 0 g2 wg1 1 g2 wg2 2 g1 wg2 2 r2 g0 wg1 1 r1 wg0 0 wr2 r0 wr1 wr0"
IN_LINE = "g0 0 g1 1 g2 2 g2 2 r2 g1 1 r1 g0 0 r0"


@pytest.mark.parametrize(("comm_stream", "order"), [(True, BESIDE), (False, IN_LINE)])
@pytest.mark.parametrize(("h2d_prefetch", "copied"), [(True, [0, 1]), (False, [0])])
def test_transfers_are_a_turn_ahead_and_buffers_wait_for_their_reduction(
    events_of_a_step, comm_stream, order, h2d_prefetch, copied
):
    assert events_of_a_step(comm_stream=comm_stream, h2d_prefetch=h2d_prefetch) == (order, copied)
