"""The verdict on GPUs: a small slowdown, and a straggler, against a baseline recorded a moment ago."""

import json

import pytest

from pytest_aorta.plan.accelerators import visible_devices

pytestmark = pytest.mark.skipif(len(visible_devices()) < 2, reason="needs two GPUs")

INNER = """
import json, pathlib, pytest

FAULT = json.loads(pathlib.Path(__file__).with_name("fault.json").read_text())

@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.tolerance(step_time_p50="3%")
def test_speed(workload):
    size = dict(dim=2048, n_layers=4, n_heads=16, n_kv_heads=4, ffn_hidden=8192, vocab_size=32000, seq_len=4096)
    sizes = dict(size, batch_size=4, param_dtype="bfloat16", steps=30, warmup=10)
    workload.check(workload.run("llama_fsdp2", **sizes, fault=FAULT))
"""


@pytest.fixture
def suite(pytester, inner):
    def run(fault, *options):
        pytester.path.joinpath("fault.json").write_text(json.dumps(fault), encoding="utf-8")
        return inner(INNER, *options)

    return run


def test_slower_steps_and_one_slow_rank_are_found_against_a_learned_baseline(suite, pytester):
    suite({}, "--update-baselines", "--aorta-launches=5").assert_outcomes(passed=1)
    stored = next(pytester.path.glob("baselines/*/*.json"))
    facts = json.loads(stored.read_text())["launches"][0]["facts"]
    p50_ms = facts["step_time_ms"]["p50"]
    # The device decides: step times of a late host vary by more than what is planted.
    assert facts["metrics"]["device_idle_ms"] < 0.05 * p50_ms
    suite({}).assert_outcomes(passed=1)

    everywhere = suite({"kind": "slowdown", "rank": None, "delay_ms": 0.08 * p50_ms})
    everywhere.assert_outcomes(failed=1)
    everywhere.stdout.re_match_lines_random([r"E +Regression: step_time_p50 \+.*, limit 3%\)"])
    assert "suspect rank" not in everywhere.stdout.str()

    one_rank = suite({"kind": "slowdown", "rank": 1, "delay_ms": 0.12 * p50_ms})
    one_rank.assert_outcomes(failed=1)
    one_rank.stdout.re_match_lines_random(
        [
            r"E +Regression: step_time_p50 \+.*, suspect rank 1",
            r"E +rank 1 is late: others wait .* ms/step longer for it than in the baseline",
        ]
    )
