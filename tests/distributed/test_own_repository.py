"""A training script and a workload of the user's own, next to the built-in ones."""

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
recorder.start(torch.device("cpu"), warmup=1)
for step in range(int(sys.argv[1])):
    with recorder.step():
        loss = model(torch.ones(1, 8)).sum()
        dist.all_reduce(loss)
recorder.metric("tokens_per_s", 12.5)
dist.destroy_process_group()
"""

WORKLOAD = """
from pytest_aorta.worker import RankEnv, RankResult, StepTimer, Workload, environment_facts
import torch.distributed as dist
from .shape import SHAPE

class Own(Workload):
    def setup(self):
        self.device = RankEnv.read().join("own")

    def run(self):
        timer = StepTimer(self.device)
        for _ in range(self.config["steps"]):
            with timer.step():
                dist.barrier()
        return RankResult(
            passed=True, failure_count=0, configured_iterations=self.config["steps"],
            total_iterations=self.config["steps"], step_times_ms=timer.step_times_ms(), elapsed_sec=0.1,
            metrics={"shape": SHAPE}, environment=environment_facts(self.device),
        )

    def cleanup(self):
        dist.destroy_process_group()

class NotOne:
    pass
"""

YAML = """
description: an own workload
class: {name}
config:
  steps: {{type: integer, minimum: 1, default: 3, description: measured steps}}
"""

TESTS = """
import pytest

pytestmark = pytest.mark.world(size=2, device="cpu")

def test_script(workload):
    result = workload.run_script("train.py", ["4"])
    assert [len(times) for times in result.rank_step_times_ms] == [3, 3]
    assert result.rank_metrics == {"tokens_per_s": [12.5, 12.5]}

def test_own_beside_builtin(workload):
    own = workload.run("own")
    assert own.rank_metrics["shape"] == [7, 7]
    workload.run("fsdp", steps=1, warmup=0, verify=1)

def test_no_workload(workload):
    workload.run("notone")
"""


def test_own_script_and_workload_run_beside_the_builtin_ones(pytester, inner, on_cpu):
    pytester.makepyfile(train=SCRIPT)
    for name, cls in (("own", "Own"), ("notone", "NotOne")):
        folder = pytester.path / "workloads" / name
        folder.mkdir(parents=True)
        folder.joinpath("__init__.py").write_text(WORKLOAD, encoding="utf-8")
        folder.joinpath("shape.py").write_text("SHAPE = 7\n", encoding="utf-8")
        folder.joinpath("default.yaml").write_text(YAML.format(name=cls), encoding="utf-8")
    result = inner(TESTS, "--aorta-launcher=forkserver")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*TypeError: *NotOne has to be a subclass of pytest_aorta.worker.Workload*"])
