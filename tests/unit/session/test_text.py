from __future__ import annotations

from pathlib import Path

import pytest

from pytest_aorta.session.rounds import comparison_text
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import compared, default_priors, make_baseline, make_facts, stored

FILE = Path("/repo/baselines/nvidia-h200-x2-nccl/x.json")
CONFIG = {"steps": 20, "dtype": "float32"}


def text_of(
    baseline: Baseline | None,
    config: dict[str, object] = CONFIG,
    test: str = "tests/test_a.py::test_x",
    marked: dict[str, Tolerance] | None = None,
    num_launches: int = 1,
    **facts: object,
) -> list[str]:
    launches = [make_facts(**facts)] * num_launches
    marked = marked or {"peak_memory_bytes": Tolerance(0.02)}
    comparison = StoredComparison(
        "tests/test_a.py::test_x::fsdp", config, baseline, marked, default_priors, num_launches, str(FILE)
    )
    verdicts = comparison.judge(launches)
    failing = verdicts.failing({Outcome.MISSING})
    case = "tests/test_a.py::test_x::fsdp"
    ended = compared(case, *launches, platform="cpu-x1-gloo", workload="toy", baseline=str(FILE), notes=("a note",))
    return comparison_text(ended, failing, test).splitlines()


def test_test_id_with_brackets_can_be_pasted_into_a_shell():
    lines = text_of(None, metrics={"peak_memory_bytes": 1.0}, test="tests/test_a.py::test_x[a b]")
    assert lines[0].endswith("record one with: pytest 'tests/test_a.py::test_x[a b]' --update-baselines")


@pytest.mark.parametrize(
    ("facts", "is_shown"),
    [
        ({"weight_hashes": {"10": "f" * 16}}, False),
        (
            {
                "weight_hashes": {"10": "f" * 16},
                "step_time_ms": dict.fromkeys(("mean", "p50", "p99", "tail5", "max"), 40.0),
            },
            True,
        ),
    ],
    ids=["weights", "weights and times"],
)
def test_times_by_rank_are_shown_only_if_a_time_fails(facts, is_shown):
    lines = text_of(make_baseline(), marked={"step_time_p50": Tolerance(0.05)}, num_launches=3, **facts)
    assert any(line.startswith("  weight_hash: regression") for line in lines)
    assert any(line.startswith("  median step time by rank: ") for line in lines) == is_shown


def test_other_number_of_steps_is_one_line_also_for_a_metric_that_needs_more():
    long = make_facts(num_steps=100)
    lines = text_of(make_baseline(launches=stored(long)), num_steps=99, metrics={"peak_memory_bytes": 1.0})
    assert lines == [
        "toy on cpu-x1-gloo: the baseline was recorded with 100 measured steps, the test has 99; "
        "record it again with: pytest tests/test_a.py::test_x --update-baselines"
    ]


def test_metric_that_the_launch_lost_is_named_beside_a_missing_baseline():
    lines = text_of(None)
    assert lines[0] == "toy on cpu-x1-gloo, 20 steps:"
    assert lines[1].startswith("  peak_memory_bytes: missing: -, baseline -")
    assert lines[1].endswith("(the launch has no peak_memory_bytes)")
    assert lines[2].startswith("  no baseline in ")
    assert lines[3] == "  a note"
    assert len([line for line in lines if "no baseline" in line]) == 1
