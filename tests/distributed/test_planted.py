"""The harness end to end: a planted change fails exactly the right test."""

import json

import pytest

INNER = """
import json, pathlib, pytest

PLANTED = json.loads(pathlib.Path(__file__).with_name("planted.json").read_text())

pytestmark = pytest.mark.world(size=2, device="cpu")
SHORT = dict(warmup=1, verify=2, profile_steps=0)

# A step takes milliseconds, and on a busy machine several times as long.
@pytest.mark.tolerance(step_time_p50="900%")
def test_speed(workload):
    workload.check(workload.run("fsdp", steps=5, **SHORT, fault=PLANTED.get("speed", {})))

def test_weights(workload):
    workload.check(workload.run("fsdp", steps=2, **SHORT, optimizer="sgd"))
"""


@pytest.fixture
def suite(pytester, inner, on_cpu):
    def run(planted, *options):
        pytester.path.joinpath("planted.json").write_text(json.dumps(planted), encoding="utf-8")
        return inner(INNER, *options)

    return run


def failed(result):
    return {line.split("::")[1].split(" ")[0] for line in result.outlines if line.startswith("FAILED")}


def assert_green(result):
    """Check that all tests passed or stayed undecided: beside other work, five launches may be too few to decide."""
    assert set(result.parseoutcomes()) <= {"passed", "inconclusive", "deselected"}


@pytest.mark.extended
def test_slower_steps_turn_their_test_red_and_no_other(suite, pytester):
    # On a machine with other work, launches may vary by more than those of a good baseline. Three launches that vary
    # can't tell even this slowdown, and it would be inconclusive.
    assert_green(suite({}, "--update-baselines", "--aorta-launches=11", "--aorta-record=noisy:a test"))
    speed = next(pytester.path.glob("baselines/cpu-x2-gloo/*test-speed*.json"))
    median_ms = json.loads(speed.read_bytes())["launches"][0]["facts"]["step_time_ms"]["p50"]
    result = suite({"speed": {"kind": "slowdown", "delay_ms": 40 * median_ms}})
    assert failed(result) == {"test_speed"}
    result.stdout.re_match_lines_random([r"E +Regression: step_time_p50 \+.*, limit 900%\).*"])
