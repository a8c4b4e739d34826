import math
import time

from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import (
    BLOCK_GAP_S,
    blocks,
    transformed_by_revision,
    transformed_values,
)
from tests.unit.builders import baseline_of, each_of, make_baseline, make_facts, on_cpu, stored, with_p50

P50 = METRICS["step_time_p50"]
PLATFORM = make_baseline().platform


def stamped(moment_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1767225600 + moment_s))


def at(moment_s: int, build=make_facts, **changes):
    """Return a launch ``moment_s`` seconds after the start of 2026."""
    return build(measured_at=stamped(moment_s), **changes)


def clusters(*launches) -> list[int]:
    """Return for each launch the number of its block, in order of appearance."""
    keys = blocks(launches)
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


GAP_S, CPU_GAP_S = BLOCK_GAP_S["cuda"], BLOCK_GAP_S["cpu"]


BLOCKS = {
    "pause": ([at(0), at(GAP_S), at(2 * GAP_S + 1)], [0, 0, 1]),
    "no pause": ([at(number * 3600) for number in range(20)], [0] * 20),
    "pause on CPU ranks": ([at(0, on_cpu), at(CPU_GAP_S, on_cpu), at(2 * CPU_GAP_S + 1, on_cpu)], [0, 0, 1]),
    "other boot": ([at(0), at(1, block="f" * 12), at(2)], [0, 1, 0]),
    "other order": ([at(2 * GAP_S), at(0), at(2 * GAP_S + 1), at(1)], [0, 1, 0, 1]),
}


@each_of("launches, expected", BLOCKS)
def test_block_is_one_boot_without_a_pause(launches, expected):
    assert clusters(*launches) == expected


def test_launches_are_grouped_by_revision_and_block():
    late = 2 * BLOCK_GAP_S["cuda"]
    old, here, later = (with_p50(at(moment), p50) for moment, p50 in ((0, 1.0), (0, math.e), (late, math.e**2)))
    baseline = make_baseline(launches=(*stored(old, center=False), *stored(here, later, here, revision=2)))
    assert transformed_by_revision(P50, baseline) == [[[0.0]], [[1.0, 1.0], [2.0]]]


def test_values_without_a_log_do_not_count_for_the_variance():
    loss = METRICS["final_loss"]
    launches = [make_facts(final_loss=value) for value in (None, -1.0, 0.0, 1.0)]
    assert transformed_values(loss, launches, launches) == [None, None, None, 0.0]
    assert transformed_by_revision(loss, baseline_of(*launches)) == [[[0.0]]]
