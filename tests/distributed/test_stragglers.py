"""The rank that sleeps is named as the straggler, under DDP and FSDP2, in a script and in a built-in workload."""

from pathlib import Path
from statistics import median

import pytest

from pytest_aorta.result.facts import rank_lags_ms

SCRIPT = Path(__file__).parent / "scripts" / "sleeping_rank.py"
SLEEP_MS = 400

pytestmark = pytest.mark.world(size=2, device="cpu", warm=True)


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
