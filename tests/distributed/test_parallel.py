"""The axes of the Llama workloads on CPU ranks: the same model in every layout, traced and eager."""

import pytest

from tests.distributed.small_llama import trains_alike
from tests.distributed.test_pipeline_parallel import PP
from tests.unit.builders import each_of

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=4, device="cpu", warm=True), pytest.mark.launch_timeout(180)]

TRAINING = {"size": "debug", "n_layers": 2, "n_kv_heads": 4, "steps": 10, "warmup": 0, "hash_every": 1}
# The global batch is four sequences in each layout.
LAYOUTS = {
    "fsdp 4": {"batch_size": 1},
    "hsdp 2x2": {"batch_size": 1, "data_parallel_replicate_degree": 2},
    "replicas alone": {"batch_size": 1, "data_parallel_replicate_degree": 4},
    "fsdp 2, tp 2": {"batch_size": 2, "tensor_parallel_degree": 2},
    "replicas 2, tp 2": {"batch_size": 2, "data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2},
    "tp alone": {"batch_size": 4, "tensor_parallel_degree": 4},
    "fsdp 2, cp 2": {"batch_size": 2, "context_parallel_degree": 2},
    "cp 2, tp 2": {"batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "pp 2, fsdp 2": PP | {"batch_size": 1},
    "pp 2, tp 2": PP | {"batch_size": 2, "tensor_parallel_degree": 2},
    "pp 2, cp 2": PP | {"batch_size": 2, "context_parallel_degree": 2},
}
# AdamW then does not change any bit of a weight.
UNCHANGED = {"lr": 1e-60, "steps": 1}


@pytest.mark.extended
def test_layouts_begin_with_the_same_weights_and_train_alike(workload):
    trained = trains_alike(workload, TRAINING, LAYOUTS, unchanged=UNCHANGED, rel_loss=1e-5, rel_norm=1e-4)
    assert len({tuple(result.rank_metrics["num_parameters"]) for result in trained.values()}) == 1


def test_each_axis_of_a_small_model_trains_alike(workload):
    axes = [LAYOUTS[name] for name in ("fsdp 4", "cp 2, tp 2", "pp 2, fsdp 2")]
    results = [workload.run("llama_fsdp2", **TRAINING | {"steps": 3} | axis) for axis in axes]
    for result in results:
        assert result.rank_metrics["num_parameters"] == results[0].rank_metrics["num_parameters"]
        assert result.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)


@pytest.mark.extended
@each_of(
    "model",
    {
        "Llama": {},
        "recomputed": {"activation_checkpointing": "full"},
        "DeepSeek": {"size": "deepseek_debug", "n_layers": 2},
    },
)
def test_compiled_blocks_under_tensor_parallelism_train_as_eager_ones(workload, model):
    training = TRAINING | LAYOUTS["fsdp 2, tp 2"] | {"n_layers": 1, "steps": 2} | model
    eager = workload.run("llama_fsdp2", **training)
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **training)
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)
    assert compiled.grad_norm == pytest.approx(eager.grad_norm, rel=1e-5)
