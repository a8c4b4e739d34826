"""The rank that sleeps is named as the straggler, under DDP and FSDP2, in a script and in a built-in workload."""

from pathlib import Path
from statistics import median

import pytest

from pytest_aorta.result.facts import rank_lags_ms
from pytest_aorta.verdict.causes import straggler
from tests.distributed import TWO_CPU_RANKS

SCRIPT = Path(__file__).parent / "scripts" / "sleeping_rank.py"
SLEEP_MS = 400

pytestmark = TWO_CPU_RANKS


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_rank_that_sleeps_waits_for_nobody_and_its_peer_waits_for_it(workload, wrapper):
    result = workload.run_script(SCRIPT, [wrapper, str(SLEEP_MS)])
    assert [len(waits) for waits in result.collective_ms] == [5, 5]
    peer_ms, sleeper_ms = map(median, result.collective_ms)
    assert sleeper_ms < SLEEP_MS / 2 < 0.9 * SLEEP_MS < peer_ms
    lags_ms = rank_lags_ms(result.collective_ms)
    assert max(range(2), key=lambda rank: lags_ms[rank]) == 1
    facts = result.facts
    # The peer waits in the first collective of a step, so its time there is no slower transfer.
    waiting = max(facts.collectives.values(), key=lambda found: found.peers_wait_ms)
    assert (waiting.straggler, waiting.wait_ms[1] < SLEEP_MS / 2 < waiting.wait_ms[0]) == (1, True)
    assert waiting.transfer_ms < SLEEP_MS / 2
    assert {"aten::addmm", "aten::mm"} <= facts.kernels.keys()


def test_built_in_workload_records_the_waits_of_every_step(workload):
    result = workload.run("llama_fsdp2", steps=5, warmup=1)
    assert [len(waits) for waits in result.collective_ms] == [5, 5]
    # One of the two ranks arrives last at every collective, so no collective keeps both waiting.
    for *waits_ms, step_ms in zip(*result.collective_ms, result.step_times_ms, strict=True):
        assert sum(waits_ms) < step_ms
    assert sum(map(sum, result.collective_ms)) > 0


@pytest.mark.parametrize("name", ["fsdp", "ddp_overlap", "copy_compute"])
def test_built_in_workload_knows_what_else_slows_its_steps(workload, name):
    # Without it, no time of CPU ranks is judged by default.
    assert workload.run(name, steps=5, warmup=1).facts.cpu_wait is not None


COLLECTING = """
import gc
import torch, torch.distributed as dist
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
kept = [[number] for number in range(2_000_000 * dist.get_rank())]
for _ in range(6):
    with recorder.step():
        if dist.get_rank() == 1:
            gc.collect()
        dist.all_reduce(torch.ones(8))
"""


def test_late_rank_that_collects_garbage_is_said_to(workload, tmp_path):
    (tmp_path / "collecting.py").write_text(COLLECTING, encoding="utf-8")
    facts = workload.run_script(tmp_path / "collecting.py").facts
    found = straggler([facts])
    assert facts.gc_ms[1] > 10 * facts.gc_ms[0]
    assert f"garbage collection takes {min(facts.gc_ms[1], found.lag_ms):.3g} ms of it" in found.note("baseline")
    assert "garbage" not in straggler([facts], [facts.replace(rank_lag_ms=[0.0, 0.0])]).note("baseline")
