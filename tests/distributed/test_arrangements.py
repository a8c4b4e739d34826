"""The same samples in other arrangements of two real ranks: faults are found without a baseline, and named."""

import pytest

from benchmarks.numerics.arrangements import CASES, SCRIPT, arguments
from pytest_aorta import ComparisonFailed
from pytest_aorta.plan.plants import Plant, Planted
from tests.distributed import TWO_CPU_RANKS
from tests.distributed.test_own_scripts import own_leases
from tests.unit.builders import run_python

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS]
IN_CI = (
    "",
    "fsdp2",
    "expert_lost",
    "ddp_reduced_in_bfloat16",
)
SHARED = [
    {"tensor_parallel_degree": 2, "batch_size": 4},
    {"context_parallel_degree": 2, "batch_size": 4},
    {"pipeline_parallel_degree": 2, "gradient_accumulation": 2},
]


@pytest.mark.parametrize(
    "fault", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.extended) for name in CASES]
)
def test_script_with_a_fault_is_told_from_one_without(workload, fault):
    if finds := CASES[fault][1]:
        with pytest.raises(AssertionError, match=finds):
            workload.compare_arrangements(SCRIPT, **arguments(fault))
    else:
        found = workload.compare_arrangements(SCRIPT, **arguments(fault))
        assert ["accumulated" in verdicts.case for verdicts in found] == [False, True]
        assert {row.metric for row in found[0].rows} > {"samples", "gradients", "update"}


@pytest.mark.parametrize(
    ("plant", "finds"),
    [
        (Plant.SUMMED, r"all 11 x 2\.000"),
        (Plant.RATE, "learning rate 0.02 against 0.01"),
        (Plant.SAME_SAMPLES, "other samples: 4 of 8"),
    ],
)
def test_fault_that_selftest_plants_is_named(workload, monkeypatch, tmp_path, plant, finds):
    for name, value in Planted(plant, 0.0, tmp_path / "planted").environ().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ComparisonFailed, match=finds):
        workload.compare_arrangements(SCRIPT, **arguments(""))
    assert (tmp_path / "planted").exists()


def test_loader_of_a_script_without_arguments_gives_one_rank_the_batches_of_all(workload):
    (verdicts,) = workload.compare_arrangements(SCRIPT)
    assert "same 8 samples" in verdicts["samples"].detail


def test_ranks_that_share_samples_compute_the_gradients_of_one_rank(workload):
    found = workload.compare_arrangements({"workload": "llama_fsdp2"}, others=SHARED)
    assert len(found) == 5
    for verdicts, shared in zip(found, ("same 4 samples", "same 128 integers"), strict=False):
        assert shared in verdicts["samples"].detail


@pytest.mark.extended
def test_layout_that_trains_on_fewer_samples_is_not_judged(workload):
    with pytest.raises(ComparisonFailed, match=r"other samples: 2 of 4; .*gradients are not judged"):
        workload.compare_arrangements({"workload": "llama_fsdp2"}, others=[{"tensor_parallel_degree": 2}])


def test_command_names_the_fault(tmp_path):
    args = ["--batch-arg=--batch-size", "--other=--fault=times_ranks", "--gpus=0", SCRIPT, "--", "--batch-size=4"]
    done = run_python("-m", "pytest_aorta.cli", "arrange", *args, cwd=tmp_path, env=own_leases(tmp_path))
    assert done.returncode == 1
    assert "2 ranks, --fault=times_ranks, against 1 rank, a batch 2 times as large, on cpu-x2-gloo" in done.stderr
    assert "aorta: gradients: all 11 x 2.000; loss x 2.000; number of ranks: summed over ranks" in done.stderr
