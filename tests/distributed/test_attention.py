"""Attention kernels of the Llama workloads on CPU ranks: which one runs, and every layout's bits under flex."""

import pytest

from pytest_aorta.common.errors import LaunchError
from tests.distributed import TWO_CPU_RANKS

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS, pytest.mark.launch_timeout(180)]

FOUR_RANKS = pytest.mark.world(size=4, device="cpu", warm=True)
TRAINING = {"size": "debug", "n_layers": 1, "steps": 3, "warmup": 0, "hash_every": 1}
FLEX = TRAINING | {"attention": "flex"}
LAYOUTS = {
    "plain": {},
    "bfloat16": {"param_dtype": "bfloat16"},
    "tp": {"tensor_parallel_degree": 2, "n_kv_heads": 4},
    "cp": {"context_parallel_degree": 2},
    "replicas": {"data_parallel_replicate_degree": 2},
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout",
    [
        "plain",
        "bfloat16",
        "tp",
        "cp",
        pytest.param("replicas", marks=FOUR_RANKS),
    ],
)
def test_aot_eager_has_every_bit_of_fsdp2(workload, layout):
    eager, traced = (workload.run(name, **FLEX | LAYOUTS[layout]) for name in ("llama_fsdp2", "llama_simple_fsdp"))
    assert eager.environment["attention"] == traced.environment["attention"] == "flex"
    assert (traced.weight_hashes, traced.loss) == (eager.weight_hashes, eager.loss)


def test_the_kernel_that_ran_is_a_fact_and_trains_nearly_alike(workload):
    results = {name: workload.run("llama_fsdp2", **TRAINING | {"attention": name}) for name in ("auto", "math", "flex")}
    assert [result.environment["attention"] for result in results.values()] == ["flash", "math", "flex"]
    for result in results.values():
        assert result.loss == pytest.approx(results["auto"].loss, rel=1e-5)


FILLED = TRAINING | {"deterministic": True, "fill_uninitialized_memory": True}


@pytest.mark.parametrize("name", ["llama_fsdp2", pytest.param("llama_simple_fsdp", marks=pytest.mark.extended)])
def test_no_step_reads_memory_that_was_not_written(workload, name):
    plain = workload.run(name, **TRAINING | {"deterministic": True})
    filled = workload.run(name, **FILLED)
    assert (filled.weight_hashes, filled.loss) == (plain.weight_hashes, plain.loss)


def test_a_read_of_memory_that_was_not_written_is_found(workload):
    with pytest.raises(LaunchError, match="nan"):
        workload.run("llama_fsdp2", fault={"kind": "read_uninitialized", "step": 2}, **FILLED)
