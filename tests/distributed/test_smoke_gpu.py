"""Each workload, metric, launcher, profiler and plant once, in two minutes on two GPUs: ``./dev gpu --smoke``."""

import pytest

from pytest_aorta import WorkloadRunner
from pytest_aorta.cli.selftest import SIGNS
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.result.measurements import MIN_STEPS_P99
from pytest_aorta.result.trace.profiled_steps import AS_RUN
from pytest_aorta.verdict.metrics import METRICS, measured_values
from tests.distributed import ALL_GPUS, ONE_GPU
from tests.distributed.test_selftest import SCRIPT

pytestmark = [pytest.mark.smoke, pytest.mark.launch_timeout(120)]
on_all = ALL_GPUS

OF_ALL = {
    *("step_time_p50", "step_time_p10", "step_time_p99", "step_time_mean", "step_time_tail5", "peak_memory_bytes"),
    *("kernel_ms", *(name for name, row in METRICS.items() if row.cost)),
}
OF_COLLECTIVES = {"overlap_ratio", *(name for name, row in METRICS.items() if row.scheduled)}
OVERLAP = {*OF_COLLECTIVES, "exposed_comm_ms", "device_idle_ms"}
TRAINING = {*OVERLAP, "num_parameters", "weight_hash", "final_loss"}
OF_WORKLOAD = {
    "fsdp": {*OVERLAP, "gemm_throughput_tflops"},
    "llama_fsdp2": {*TRAINING, "tokens_per_s", "model_tflops"},
    "llama_simple_fsdp": {*TRAINING, "tokens_per_s", "model_tflops"},
    "ranking": {*TRAINING, "samples_per_s"},
    "ddp_overlap": {*TRAINING, "samples_per_s"},
    "copy_compute": {"overlap_saving", "gemm_throughput_tflops"},
}
# Small enough that the least number of steps with a 99th percentile takes a second.
CONFIG = {name: {"n_layers": 1} for name in ("llama_fsdp2", "llama_simple_fsdp", "ranking", "ddp_overlap")}
OF_SCRIPT = {
    "loss",
    "grad_norm",
    "other_steps_ms",
    "buffer_hash",
    "memory_growth",
    "resident_growth",
    "peak_resident_bytes",
}


def measured(result):
    """Return the metrics of a result, also those that are measured as run, since steps this short wait for the host."""
    return {name.removesuffix(AS_RUN) for name in (*measured_values([result.facts]), *result.rank_metrics)}


@on_all
@pytest.mark.parametrize("name", OF_WORKLOAD)
def test_workload_measures_its_metrics(workload: WorkloadRunner, name):
    result = workload.run(name, steps=MIN_STEPS_P99, warmup=2, **CONFIG.get(name, {}))
    # One rank communicates nothing that could be hidden.
    lacking = OF_COLLECTIVES if result.world_size == 1 else set()
    assert (OF_ALL | OF_WORKLOAD[name]) - measured(result) == lacking & OF_WORKLOAD[name]


def test_no_metric_is_forgotten():
    # The peak of matrix products is known for some GPUs alone, one rank transfers nothing and waits for no other, and
    # not every script compiles or writes checkpoints.
    transfers = {f"{kind}_ms" for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
    assert set(METRICS) - {"mfu", "late_rank_ms", "compile_s", "checkpoint_ms", *transfers} == OF_ALL.union(
        OF_SCRIPT, *OF_WORKLOAD.values()
    )


LOOP = """
import torch
import torch.distributed as dist
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=2, hash_weights=True)
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
models = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda() for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for step in range(160):
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(8, 64, device="cuda")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@ONE_GPU
def test_unedited_script_measures_its_metrics(workload: WorkloadRunner, tmp_path):
    (script := tmp_path / "train.py").write_text(LOOP)
    assert measured(workload.run_script(str(script))) >= OF_SCRIPT


COLD = """
import pytest

@pytest.mark.world(size=1, device="cuda", warm=False)
def test_traced(workload):
    result = workload.run("llama_fsdp2", steps=3, warmup=1, n_layers=1, profile_steps=0)
    assert (result.profiler, result.launcher) == ("torch", "torchrun")

@pytest.mark.world(size=1, device="cuda")
def test_traced_script(workload):
    assert workload.run_script("train.py").profiler == "torch"
"""


@pytest.mark.skipif(not visible_devices(), reason="needs a GPU")
def test_torchrun_starts_ranks_that_torchs_profiler_traces(pytester, inner):
    pytester.makepyfile(train=LOOP)
    inner(COLD, "--aorta-profiler=torch", "--aorta-results=results").assert_outcomes(passed=2)
    assert len([*pytester.path.glob("results/*/*/ranks/0/trace.json.gz")]) == 2


ON_GPUS = """
import os, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device("cuda")
"""


@on_all
@pytest.mark.launch_timeout(15)
def test_each_plant_shows_in_a_launch(workload: WorkloadRunner, monkeypatch, tmp_path):
    (script := tmp_path / "train.py").write_text(ON_GPUS + SCRIPT.replace('"gloo"', '"nccl"'))
    size = {Plant.SLOW_RANK: 300.0, Plant.MEMORY: float(1 << 30)}

    def launch():
        return workload.run_script(str(script), ["fsdp2"])

    unchanged = launch()
    # Those that show in other arrangements of the samples change nothing here, or are not planted.
    for plant in set(Plant) - {Plant.SUMMED, Plant.RATE, Plant.SAME_SAMPLES}:
        planted = Planted(plant, size.get(plant, 0.0), tmp_path / plant)
        with monkeypatch.context() as patch:
            for name, value in planted.environ().items():
                patch.setenv(name, value)
            if plant in (Plant.NAN, Plant.HANG, Plant.EXIT_CODE):
                with pytest.raises(LaunchError) as caught:
                    launch()
                assert caught.value.kind in SIGNS[plant].failures, caught.value
                assert caught.value.rank == unchanged.world_size - 1 or plant is Plant.NAN, caught.value
            else:
                changed = launch()
                is_same = changed.weight_hashes == unchanged.weight_hashes
                assert is_same is (plant in (Plant.SLOW_RANK, Plant.IN_LINE, Plant.MEMORY)), plant
                if plant is Plant.SLOW_RANK:
                    assert min(changed.step_times_ms) > size[plant]
                if plant is Plant.MEMORY:
                    held = min(changed.rank_metrics["peak_memory_bytes"])
                    assert held - max(unchanged.rank_metrics["peak_memory_bytes"]) > 0.9 * size[plant]
        # One rank's FSDP2 requests no collective.
        assert planted.mark.exists() is (plant is not Plant.IN_LINE or unchanged.world_size > 1), plant
