"""Users' annotations of the fixtures: mypy sees the methods, and what is misspelt."""

from pathlib import Path

from tests.unit.builders import run_python

ROOT = Path(__file__).parents[2]
SAMPLE = """
from pytest_aorta import Comparison, DistributedWorld, LaunchPlan, Outcome, Verdicts, WorkloadResult, WorkloadRunner

def pytest_aorta_launch(plan: LaunchPlan) -> None:
    print(plan.run_dir)

def pytest_aorta_comparison(comparison: Comparison) -> None:
    print(comparison.case)

def test_good(workload: WorkloadRunner, distributed_world: DistributedWorld) -> None:
    result: WorkloadResult = workload.run_script("train.py", ["--lr"], record={"hash_weights": True})
    verdicts: Verdicts = workload.check(workload.again(result), label=distributed_world.platform)
    assert verdicts["step_time_p50"].outcome is Outcome.PASS
    distributed_world.run("fsdp", steps=3)
    workload.run_command(("accelerate",), environment={"A": "b"}, fresh=["kept.pt"])

def test_misspelt(workload: WorkloadRunner, distributed_world: DistributedWorld) -> None:
    workload.run_script("train.py", rec0rd={})  # call-arg
    workload.run_command(["accelerate"], env={})  # call-arg
    distributed_world.launch("fsdp")  # attr-defined
    distributed_world.run_script("train.py", args="--lr 1")  # arg-type
    workload.chocks(workload.run("fsdp"))  # attr-defined
"""


def test_mypy_accepts_what_is_right_and_finds_what_is_misspelt_in_tests_of_users(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    done = run_python("-m", "mypy", "--no-error-summary", str(tmp_path / "sample.py"), cwd=ROOT)
    found = [
        (int(line.split(":")[1]), line.rpartition("[")[2][:-1])
        for line in done.stdout.splitlines()
        if ": error:" in line
    ]
    lines = enumerate(SAMPLE.splitlines(), 1)
    assert found == [(number, line.split("  # ")[1]) for number, line in lines if "  # " in line], done.stdout
