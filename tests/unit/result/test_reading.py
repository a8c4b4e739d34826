import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.plan.world import World
from pytest_aorta.result import folder as names
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.evidence import read_evidence
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import FailureDetail
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from pytest_aorta.result.reading import collect_result, read_result
from pytest_aorta.result.trace.profiled_steps import CollectiveFacts, FamilyTime
from tests.unit.builders import (
    ENDED_WELL,
    each_of,
    make_plan,
    make_result,
    rank_values,
    read_json,
    run_python,
    schema_violation,
    write_plan_file,
    write_rank_file,
    write_ranks,
)

STEP = {
    "step_ms": 10.0,
    "compute_ms": 6.0,
    "comm_ms": 3.0,
    "copy_ms": 0.0,
    "idle_ms": 3.0,
    "hidden_comm_ms": 2.0,
    "collectives": {"all_gather": {"total_ms": 3.0, "hidden_ms": 2.0}},
}
LANES = {"compute": [[0.0, 6.0]], "all_gather": [[4.0, 7.0]]}


def collect(tmp_path, *ranks: dict):
    write_ranks(tmp_path, *ranks)
    return collect_result(make_plan(tmp_path), ENDED_WELL)


def collect_error(tmp_path) -> str:
    with pytest.raises(ResultError, match=r"^result invalid: ") as caught:
        collect_result(make_plan(tmp_path), ENDED_WELL)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "result.json").exists()
    return str(caught.value)


def rank_file_error(tmp_path, text: str) -> str:
    """Return the error if rank 1 left ``text``."""
    write_ranks(tmp_path, rank_values())
    path = write_rank_file(tmp_path, 1, "result.json", text)
    message = collect_error(tmp_path)
    assert message.startswith(f"result invalid: {path}: ")
    return message


def rank_value_error(tmp_path, **changes) -> str:
    return rank_file_error(tmp_path, json.dumps(rank_values(**changes)))


def ranks_error(tmp_path, **changes) -> str:
    """Return the error if rank 1 contradicts rank 0."""
    write_ranks(tmp_path, rank_values(), rank_values(**changes))
    return collect_error(tmp_path)


def failed(*details: FailureDetail) -> dict:
    return rank_values(passed=False, failure_count=len(details), failures=[to_builtins(detail) for detail in details])


def test_tracer_of_any_rank_is_a_fact_of_the_launch(tmp_path):
    traced = rank_values()["environment"] | {"python_tracer": "cProfile.Profile"}
    result = collect(tmp_path, rank_values(), rank_values(environment=traced))
    assert result.environment == traced


def test_ranks_are_merged_in_order(tmp_path):
    norms = {"grad_norm": [1.5, 1.25, 1.0]}
    slow = rank_values(step_times_ms=[4.0, 5.0, 6.0], elapsed_sec=0.7, **norms)
    result = collect(tmp_path, rank_values(**norms), slow)
    assert result.grad_norm == norms["grad_norm"]
    assert result.rank_step_times_ms == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert result.rank_metrics == {"tokens_per_s": [100.0, 100.0]}
    assert (result.passed, result.elapsed_sec, result.world_size) == (True, 0.7, 2)
    assert result.launch_times_s == {"wall": 1.5}


def test_what_ranks_need_not_measure_is_empty_where_they_did_not(tmp_path):
    result = collect(tmp_path, rank_values(), rank_values())
    assert (result.grad_norm, result.tensor_hashes) == ([], {})
    assert (result.overlap, result.timeline, result.kernels, result.collectives) == ([], [], [], [])
    assert not {"kernels", "collectives"} & to_builtins(result.facts).keys()
    assert read_result(tmp_path / "result.json") == result


def test_ranks_of_an_unedited_script_are_cut_to_the_steps_that_all_have(tmp_path):
    own = {
        "loss": [],
        "series": [{"optimizer": "SGD", "num_steps": 3, "is_main": True}],
        "collective_ms": [0.5, 0.5, 0.5],
    }
    more = {"configured_iterations": 4, "total_iterations": 4, "step_times_ms": [4.0, 3.0, 2.0, 1.0], "overlap": [STEP]}
    other = (
        own
        | more
        | {"series": [{"optimizer": "SGD", "num_steps": 4, "is_main": True}], "collective_ms": [1.0, 2.0, 3.0, 4.0]}
    )
    result = collect(tmp_path, rank_values(**own, overlap_problem="run 1 more step"), rank_values(**other))
    assert result.rank_step_times_ms == [[1.0, 2.0, 3.0], [4.0, 3.0, 2.0]]
    assert [rank.profile.problem for rank in result.ranks] == ["run 1 more step"] * 2
    assert (result.overlap, result.collective_ms) == ([], [[0.5, 0.5, 0.5], [1.0, 2.0, 3.0]])


def test_failed_checks_of_all_ranks_are_counted_and_put_in_order(tmp_path):
    late, early = FailureDetail("gather", 5, 0), FailureDetail("gather", 2, 1, layer=1)
    result = collect(tmp_path, failed(late), failed(early))
    assert (result.passed, result.failure_count, result.first_failure_iteration) == (False, 2, 2)
    assert result.failure_details == [early, late]


NOT_STRICT = {
    "empty": ("", "empty"),
    "truncated": (json.dumps(rank_values())[:-5], "not valid JSON"),
    "NaN": (json.dumps(rank_values(elapsed_sec=float("nan"))), "NaN is not a finite number"),
    "infinite": (json.dumps(rank_values(loss=[1.0, 2.0, float("-inf")])), "-Infinity is not a finite number"),
    "1e999": (json.dumps(rank_values()).replace('"elapsed_sec": 0.5', '"elapsed_sec": 1e999'), "1e999 is not a finite"),
    "list": ("[]", "$: Expected `object`, got `array`"),
}


@each_of("text, message", NOT_STRICT)
def test_rank_file_that_is_not_strict_json_is_refused(tmp_path, text, message):
    assert message in rank_file_error(tmp_path, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passed": "yes"}, '$.passed: got "yes"; Expected `bool`'),
        ({"step_times_ms": [1.0, -2.0, 3.0]}, "$.step_times_ms[1]: got -2.0; Expected `float` >= 0"),
        ({"step_times_ms": []}, "$.step_times_ms: Expected `array` of length >= 1"),
        ({"metrics": {"a": 1.0, "b": None, "c": None}}, "$.metrics[...]: Expected `float`, got `null`"),
        ({"metrics": {"a": 1.0, "Tokens/s": 1.0}}, "$.metrics: Expected `str` matching regex"),
        ({"weight_hashes": {"3": "XYZ"}}, "$.weight_hashes[...]: Expected `str` matching regex"),
        ({"environment": {"torch": []}}, "$.environment[...]: Expected"),
        ({"extra": 1}, "extra"),
        ({"timeline": {"compute": [[-1.0, 0.0]]}}, "$.profile.timeline[...]: Expected `float` >= 0.0"),
        # Values that contradict each other.
        ({"passed": True, "failure_count": 2}, "passed is True with failure_count 2"),
        ({"passed": False, "failure_count": 0}, "passed is False with failure_count 0"),
        ({"total_iterations": 2}, "3 iterations configured, 2 done, 3 step times; they have to be equal"),
        ({"configured_iterations": 4}, "4 iterations configured, 3 done, 3 step times; they have to be equal"),
        ({"step_times_ms": [1.0]}, "3 iterations configured, 3 done, 1 step times; they have to be equal"),
        *(
            ({name: [2.0, 1.0]}, f"{name} has 2 values for 3 measured steps; record it after every step, as recorder.")
            for name in ("loss", "grad_norm")
        ),
        ({"collective_ms": [1.0] * 4}, "collective_ms has 4 entries for 3 steps; allowed is one per step"),
    ],
)
def test_wrong_value_of_a_rank_is_named_with_its_place_and_what_is_allowed(tmp_path, changes, message):
    assert message in rank_value_error(tmp_path, **changes)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_loss_of_each_ranks_own_batch_says_how_to_reduce_it(tmp_path, name):
    message = ranks_error(tmp_path, **{name: [9.0, 8.0, 7.0]})
    assert f"{name} of rank 1 is [9.0, 8.0, 7.0], of rank 0" in message
    assert message.endswith("reduce it over the ranks, e.g. with dist.all_reduce, and record it on every rank")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"weight_hashes": {"3": "cd" * 8}}, "weight_hashes of rank 1 is {'3': 'cdcdcdcdcdcdcdcd'}, of rank 0"),
        ({"loss": [3.0, 2.0, 9.0]}, "loss of rank 1 is [3.0, 2.0, 9.0], of rank 0 [3.0, 2.0, 1.0]"),
        ({"grad_norm": [1.5] * 3}, "grad_norm of rank 1 is [1.5, 1.5, 1.5], of rank 0 []"),
        ({"metrics": {}}, "metrics of rank 1 is [], of rank 0 ['tokens_per_s']"),
        (
            {"step_times_ms": [1.0, 2.0], "configured_iterations": 2, "total_iterations": 2, "loss": [3.0, 2.0]},
            "number of step times of rank 1 is 2, of rank 0 3; they have to be equal",
        ),
        ({"tensor_hashes": {"weights": {"names": [], "shapes": [], "steps": {}}}}, "tensor_hashes of rank 1 is"),
        ({"overlap": [STEP]}, "number of profiled steps of rank 1 is 1, of rank 0 0"),
    ],
)
def test_ranks_that_contradict_each_other_are_named(tmp_path, changes, what):
    assert what in ranks_error(tmp_path, **changes)


@pytest.mark.parametrize(("known", "waits"), [([5.0, 6.0], [[2.0, 3.0], [5.0, 6.0]]), ([], [[], []])])
def test_waits_of_unequally_many_steps_are_cut_to_the_last_in_common(tmp_path, known, waits):
    result = collect(tmp_path, rank_values(collective_ms=[1.0, 2.0, 3.0]), rank_values(collective_ms=known))
    assert result.collective_ms == waits


def test_memory_is_kept_by_rank(tmp_path):
    result = collect(tmp_path, rank_values(memory_bytes=[7]), rank_values(memory_bytes=[8, 9]))
    assert result.memory_bytes == [[7], [8, 9]]


def test_every_rank_of_the_world_is_read(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    with pytest.raises(ResultError, match=r"ranks/2/result\.json"):
        collect_result(make_plan(tmp_path, world=World(3, "cpu")), ENDED_WELL)


@pytest.mark.parametrize("version", [0, 3, "4", None])
def test_stored_result_of_another_version_is_refused_with_the_remedy(tmp_path, version):
    collect(tmp_path, rank_values(), rank_values())
    with pytest.raises(ResultError, match=r"\$\.schema_version: .*run the workload again"):
        read_result(stored(tmp_path, schema_version=version))


def stored(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(read_json(path) | changes))
    return path


def test_result_fits_the_schema_that_others_validate_with(tmp_path, monkeypatch):
    collect(tmp_path, rank_values(overlap=[STEP], timeline=LANES), rank_values(overlap=[STEP], timeline=LANES))
    document = read_json(tmp_path / "result.json")
    assert schema_violation(document, "workload_result.schema.json") is None
    read_result(tmp_path / "result.json")
    for wrong in ({"extra": 1}, {"step_times_ms": [1.0]}, {"device": "abacus"}, {"ranks": []}):
        assert schema_violation(document | wrong, "workload_result.schema.json")
        with pytest.raises(ResultError):
            read_result(stored(tmp_path, **document | wrong))


def hashes_of(*names: str) -> dict:
    return {"names": list(names), "shapes": [[2]] * len(names), "steps": {"3": ["0" * 32] * len(names)}}


def test_hashes_of_tensors_are_kept_once(tmp_path):
    ranks = [rank_values(tensor_hashes={"weights": hashes_of("w", "v")})] * 2
    result = collect(tmp_path, *ranks)
    assert result.tensor_hashes["weights"].names == ["w", "v"]
    assert read_result(tmp_path / "result.json") == result


def test_profiled_steps_and_timelines_are_kept_by_rank(tmp_path):
    result = collect(tmp_path, rank_values(overlap=[STEP], timeline=LANES), rank_values(overlap=[STEP], timeline=LANES))
    assert [step.exposed_comm_ms for rank in result.overlap for step in rank] == [1.0, 1.0]
    assert result.overlap[1][0].collectives["all_gather"].exposed_ms == 1.0
    assert result.timeline == [LANES, LANES]
    assert read_result(tmp_path / "result.json") == result


def test_kernels_and_collectives_of_profiled_steps_are_kept_by_rank(tmp_path):
    kernels = {"gemm": {"ms": 6.0, "calls": 4.0}}
    gathers = {"kind": "all_gather", "group": "0 [0, 1]", "group_size": 2, "num_bytes": 1 << 20, "ms": [3.0]}
    ranks = [rank_values(overlap=[STEP], kernels=kernels, collectives=[gathers | {"ms": [ms]}]) for ms in (3.0, 1.0)]
    result = collect(tmp_path, *ranks)
    assert result.kernels == [{"gemm": FamilyTime(6.0, 4.0)}] * 2
    assert read_result(tmp_path / "result.json") == result
    facts = result.facts
    assert facts.kernels == {"gemm": FamilyTime(6.0, 4.0)}
    assert facts.collectives["all_gather"] == CollectiveFacts(1.0, 524288.0, 1.0, [2.0, 0.0], 1)
    assert convert(to_builtins(facts), LaunchFacts, "facts") == facts


def test_reason_for_missing_overlap_is_kept_with_the_times(tmp_path):
    ranks = [rank_values(overlap_problem="the trace is too large")] * 2
    result = collect(tmp_path, *ranks)
    assert read_result(tmp_path / "result.json") == result
    facts = result.facts
    assert facts.description.overlap_problem == "the trace is too large"
    assert facts.step_time_ms["p50"] == result.metrics["step_time_p50"]


NAMES = [
    names.PID_FILE,
    names.PROGRESS_FILE,
    names.OUTPUT_LOG,
    names.STACKS_FILE,
    names.ERROR_FILE,
    names.IN_FLIGHT_FILE,
    names.RESULT_FILE,
]
ROOT = Path(__file__).parents[3]


def read_everything(run_dir: Path) -> None:
    """Read all files that pytest reads of a failed launch."""
    write_plan_file(run_dir)
    plan = make_plan(run_dir, world=World(len(NAMES), "cpu"))
    read_evidence(plan)
    assert launch_failure(plan, LaunchOutcome(EndReason.TIME_LIMIT, None, (), (), 1.0)) is not None


def test_fifos_of_ranks_do_not_block_the_diagnosis(tmp_path):
    for rank, name in enumerate(NAMES):
        (folder := names.rank_folder(tmp_path, rank)).mkdir(parents=True)
        os.mkfifo(folder / name)
    code = "import sys; from pathlib import Path; from tests.unit.result.test_reading import read_everything as r"
    # A separate process, because only its end stops a wait for the FIFO's writer.
    run_python("-c", f"{code}; r(Path(sys.argv[1]))", str(tmp_path), cwd=ROOT, timeout=60, check=True)


def test_link_of_a_rank_is_not_followed(tmp_path):
    folder = names.rank_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text('{"type": "secret", "message": "", "traceback": "", "time_ns": 1}\n')
    for name in (names.ERROR_FILE, names.OUTPUT_LOG, names.STACKS_FILE):
        (folder / name).symlink_to(tmp_path / "secret")
    rank = read_evidence(make_plan(tmp_path))[1]
    assert (rank.error, rank.log_tail, rank.frames) == (None, (), ())


LOCATED = FailureDetail(
    "all_gather",
    iteration=4,
    rank=1,
    layer=2,
    source_rank=0,
    index=7,
    count=3,
    total=16,
    expected=1.5,
    actual=0.0,
    cause="zeroed shard",
)


def test_failed_check_says_what_it_knows_of_where_how_many_and_what():
    places = (
        "iteration 4",
        "layer 2",
        "rank 1",
        "source rank 0",
        "3 of 16",
        "index 7",
        "expected 1.5, got 0",
        "zeroed",
    )
    assert [part for part in places if part not in str(LOCATED)] == []
    assert re.fullmatch("loss: .*rank 3: 1 element.*", str(FailureDetail("loss", iteration=0, rank=3)))


@pytest.mark.parametrize(("steps", "names"), [(99, {"step_time_p50"}), (100, {"step_time_p50", "step_time_p99"})])
def test_percentile_of_a_tail_needs_a_hundred_steps(steps, names):
    assert set(make_result([[float(step) for step in range(steps)]]).metrics) == names


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20), st.integers(100, 130))
def test_quantiles_of_a_result_are_those_that_verdicts_compare(values, steps):
    times = (values * steps)[:steps]
    metrics = make_result([times]).metrics
    assert metrics["step_time_p50"] == pytest.approx(np.quantile(times, 0.5))
    assert metrics["step_time_p99"] == pytest.approx(np.quantile(times, 0.99))


def test_metrics_over_ranks_are_the_largest_peak_and_the_mean_of_others():
    ranks = {"peak_x": [1.0, 3.0], "gemm_throughput_tflops": [1, 2], "x": [1.7e308, 1.7e308]}
    assert make_result([[1.0], [2.0]], rank_metrics=ranks).metrics == {
        "peak_x": 3.0,
        "gemm_throughput_tflops": 1.5,
        "gemm_throughput": 1.5,
        "x": 1.7e308,
        "step_time_p50": 2.0,
    }
