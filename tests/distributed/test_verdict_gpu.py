"""The verdict on GPUs: a small slowdown, and a straggler, against a baseline recorded a moment ago."""

import json
import re

import pytest

from pytest_aorta.plan.accelerators import visible_devices
from tests.unit.builders import read_json, write

pytestmark = [pytest.mark.timed, pytest.mark.skipif(len(visible_devices()) < 2, reason="needs two GPUs")]

INNER = """
import json, pathlib, pytest

FAULTS = pathlib.Path("faults.json")

@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.tolerance(step_time_p50="3%")
def test_speed(workload):
    fault, *rest = json.loads(FAULTS.read_text())
    FAULTS.write_text(json.dumps(rest))
    size = dict(dim=2048, n_layers=4, n_heads=16, n_kv_heads=4, ffn_hidden=8192, vocab_size=32000, seq_len=4096)
    sizes = dict(size, batch_size=4, param_dtype="bfloat16", steps=30, warmup=10)
    workload.check(workload.run("llama_fsdp2", **sizes, fault=fault))
"""


def test_slower_steps_and_one_slow_rank_are_found_against_a_learned_baseline(inner, pytester):
    def suite(faults, *options):
        """Run the test once with each fault, in one session, which imports torch once."""
        write(pytester.path.joinpath("faults.json"), json.dumps(faults))
        return inner(INNER, "--keep-duplicates", *["test_inner.py"] * len(faults), *options)

    suite([{}], "--update-baselines", "--aorta-launches=5").assert_outcomes(passed=1)
    stored = next(pytester.path.glob("baselines/*/*.json"))
    facts = read_json(stored)["launches"][0]["facts"]
    p50_ms = facts["step_time_ms"]["p50"]
    # The device decides: step times of a late host vary by more than what is planted.
    assert facts["metrics"]["device_idle_ms"] < 0.05 * p50_ms

    slowdowns = {None: 0.08 * p50_ms, 1: 0.12 * p50_ms}
    faults = [{"kind": "slowdown", "rank": rank, "delay_ms": delay_ms} for rank, delay_ms in slowdowns.items()]
    found = suite([{}, *faults])
    found.assert_outcomes(passed=1, failed=2)
    _, everywhere, one_rank = re.split("^_+ test_speed _+$", found.stdout.str(), flags=re.MULTILINE)
    assert re.search(r"E +Regression: step_time_p50 \+.*, limit 3%\)", everywhere)
    assert "suspect rank" not in everywhere
    assert re.search(r"E +Regression: step_time_p50 \+.*, suspect rank 1", one_rank)
    assert re.search(r"E +rank 1 is late: others wait .* ms/step longer for it than in the baseline", one_rank)
