from __future__ import annotations

from pathlib import Path

import pytest

from pytest_aorta.session.rounds import Repeated, comparison_text
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
    commit: tuple[str, ...] = (),
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
    again = Repeated(test, ["--aorta-gpus=2"], commit, has_later=bool(commit))
    return comparison_text(ended.replace(suspect=1), failing, again).splitlines()


def test_test_id_with_brackets_can_be_pasted_into_a_shell():
    lines = text_of(None, metrics={"peak_memory_bytes": 1.0}, test="tests/test_a.py::test_x[a b]")
    assert lines[-1].startswith("  accept    pytest 'tests/test_a.py::test_x[a b]' ")


def test_changed_config_is_one_line_with_every_key():
    config = CONFIG | {"steps": 30, "dtype": "bfloat16"}
    lines = text_of(make_baseline(), config, metrics={"peak_memory_bytes": 1.0})
    assert lines[0] == (
        "Missing: the baseline was recorded with dtype='float32', steps=20, the test has dtype='bfloat16', steps=30"
    )
    assert lines[-1].endswith(" --update-baselines")


SLOW = dict.fromkeys(("mean", "p50", "p99", "tail5", "max"), 40.0)


@pytest.mark.parametrize("commit", [(), ("a1b2c3d", "4 days ago")], ids=["no commit", "a commit"])
def test_slower_step_says_what_confirms_finds_and_accepts_it(commit):
    first, measured, *facts = text_of(
        make_baseline(), marked={"step_time_p50": Tolerance(0.05)}, num_launches=3, commit=commit, step_time_ms=SLOW
    )
    assert first.endswith("(10 -> 40 ms, limit 5%), suspect rank 1")
    assert measured.startswith("  measured  toy on cpu-x1-gloo, 20 steps, 3 launches, 95% +")
    test = "tests/test_a.py::test_x --aorta-gpus=2"
    assert facts == [
        "  cause     a note",
        f"  baseline  {', '.join([*commit, str(FILE)])}",
        f"  confirm   pytest {test} --aorta-ab={commit[0] if commit else 'HEAD'}",
        *([f"  find      aorta bisect a1b2c3d HEAD -- {test}"] if commit else []),
        f"  accept    pytest {test} --update-baselines --aorta-record=replace",
    ]


def test_worst_verdict_comes_first_and_the_others_have_one_line_each():
    other = {"weight_hashes": {"10": "f" * 16}, "step_time_ms": SLOW}
    marked = {"step_time_p50": Tolerance(0.05), "step_time_mean": Tolerance(1.0)}
    lines = text_of(make_baseline(), marked=marked, num_launches=3, **other)
    assert [line.split()[1] for line in lines[:3]] == ["weight_hash", "step_time_p50", "step_time_mean"]
    assert lines[3].startswith("  measured ")


def test_other_number_of_steps_is_one_line_also_for_a_metric_that_needs_more():
    long = make_facts(num_steps=100)
    lines = text_of(make_baseline(launches=stored(long)), num_steps=99, metrics={"peak_memory_bytes": 1.0})
    assert lines[0] == "Missing: the baseline was recorded with 100 measured steps, the test has 99"


def test_metric_that_the_launch_lost_is_named_beside_a_missing_baseline():
    lines = text_of(None)
    assert lines[:2] == ["Missing: peak_memory_bytes, the launch has no peak_memory_bytes", "Missing: no baseline"]
    assert lines[-1].endswith(" --update-baselines")
