"""The axes of `llama_fsdp2` under NCCL, experts among them: every layout trains like FSDP.

`test_layouts_gpu.py` trains traced models.
"""

import importlib.util

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import small_llama
from tests.distributed.test_parallel import LAYOUTS as ON_CPU
from tests.distributed.test_parallel import UNCHANGED
from tests.unit.builders import each_of

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size=4, device="cuda", warm=True),
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.TRAINING | {"param_dtype": "bfloat16", "steps": 10, "deterministic": True}
LAYOUTS = {name: layout for name, layout in ON_CPU.items() if name != "replicas alone"}
# In float32, since bfloat16 rounding sends near ties of a router to different experts in different layouts.
EXPERTS = small_llama.TRAINING | {"num_experts": 8, "batch_size": 1, "steps": 5, "deterministic": True}
BFLOAT16 = EXPERTS | {"param_dtype": "bfloat16"}
# The global batch is four sequences in each layout.
OF_EXPERTS = {
    "fsdp 4": {},
    "ep 2": {"expert_parallel_degree": 2},
    "ep 4": {"expert_parallel_degree": 4},
    "hsdp 2x2, ep 2": {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
    "cp 2, ep 4": {"batch_size": 2, "context_parallel_degree": 2, "expert_parallel_degree": 4},
}
# The config, its layouts, and the limits of relative differences of losses and of norms.
MODELS = {
    "dense": (TRAINING, LAYOUTS, 2e-3, 2e-2),
    "experts": (EXPERTS, OF_EXPERTS, 1e-4, 1e-3),
    "experts, bfloat16": (BFLOAT16, OF_EXPERTS, 1e-2, None),
}
COMPILED_TOO = [("dense", name) for name in ("hsdp 2x2", "fsdp 2, tp 2", "fsdp 2, cp 2", "pp 2, fsdp 2")]
COMPILED_TOO += [("experts, bfloat16", name) for name in ("fsdp 4", "ep 2")]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def eager(workload, known):
    """Return a function for results of `llama_fsdp2` by layout and model, each launched once."""

    def result_of(layout, model="dense"):
        training, layouts, *_ = MODELS[model]
        if (layout, model) not in known:
            known[layout, model] = workload.run("llama_fsdp2", **training | layouts[layout])
        return known[layout, model]

    return result_of


def assert_alike(result, other, model):
    *_, rel_loss, rel_norm = MODELS[model]
    assert result.loss == pytest.approx(other.loss, rel=rel_loss)
    assert rel_norm is None or result.grad_norm == pytest.approx(other.grad_norm, rel=rel_norm)


@each_of(
    "model, names",
    {
        "dense": ("dense", ["fsdp 4", "hsdp 2x2", "replicas 2, tp 2", "cp 2, tp 2", "pp 2, fsdp 2", "pp 2, tp 2"]),
        "experts": ("experts", ["fsdp 4", "ep 2", "hsdp 2x2, ep 2"]),
    },
)
def test_layouts_begin_with_the_same_weights(workload: WorkloadRunner, model, names):
    training, layouts, *_ = MODELS[model]
    initial = {
        name: workload.run("llama_fsdp2", **training | layouts[name] | UNCHANGED).weight_hashes["1"] for name in names
    }
    assert len(set(initial.values())) == 1, initial


@pytest.mark.parametrize(
    ("model", "layout"), [(model, name) for model in ("dense", "experts") for name in [*MODELS[model][1]][1:]]
)
def test_layout_trains_as_fsdp_does(eager, model, layout):
    assert_alike(eager(layout, model), eager("fsdp 4", model), model)


@pytest.mark.parametrize(("model", "layout"), COMPILED_TOO)
def test_compiled_blocks_train_as_eager_ones(workload: WorkloadRunner, eager, model, layout):
    training, layouts, *_ = MODELS[model]
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **training | layouts[layout])
    assert_alike(compiled, eager(layout, model), model)


@pytest.mark.parametrize(
    "keys",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"forward_prefetch": 1, "backward_prefetch": 1},
    ],
    ids=str,
)
def test_exchanges_that_are_repeated_or_gathered_ahead_have_every_bit(workload: WorkloadRunner, eager, keys):
    changed = workload.run("llama_fsdp2", **BFLOAT16 | OF_EXPERTS["ep 2"] | keys)
    plain = eager("ep 2", "experts, bfloat16")
    assert changed.weight_hashes == plain.weight_hashes
    assert (changed.loss, changed.grad_norm) == (plain.loss, plain.grad_norm)


def test_a_rank_to_which_no_token_goes_takes_part(workload: WorkloadRunner):
    # Four tokens per step.
    starved = BFLOAT16 | {"seq_len": 1, "top_k": 1, "steps": 3}
    reference = workload.run("llama_fsdp2", **starved)
    result = workload.run("llama_fsdp2", expert_parallel_degree=4, **starved)
    assert result.loss == pytest.approx(reference.loss, rel=2e-2)


def test_a_pipeline_has_the_same_bits_again(workload: WorkloadRunner, eager):
    one, other = eager("pp 2, fsdp 2"), workload.run("llama_fsdp2", **TRAINING | LAYOUTS["pp 2, fsdp 2"])
    assert (one.weight_hashes, one.loss, one.grad_norm) == (other.weight_hashes, other.loss, other.grad_norm)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_stages_a_rank_have_the_bits_of_one(workload: WorkloadRunner, schedule):
    changed = {"n_layers": 4, "gradient_accumulation": 4, "reduce_dtype": "bfloat16", "max_grad_norm": None}
    training = TRAINING | LAYOUTS["pp 2, fsdp 2"] | changed | {"reshard_after_forward": False}
    one, two = (workload.run("llama_fsdp2", pipeline_parallel_schedule=name, **training) for name in ("1F1B", schedule))
    assert (one.weight_hashes, one.loss) == (two.weight_hashes, two.loss)


def test_a_checkpoint_goes_on_in_another_layout(workload: WorkloadRunner, tmp_path):
    folder = str(tmp_path / "saved")
    training = TRAINING | {"steps": 3}
    saved = workload.run("llama_fsdp2", save_checkpoint=folder, **training | LAYOUTS["replicas 2, tp 2"])
    for layout in ("fsdp 4", "fsdp 2, cp 2", "pp 2, fsdp 2"):
        same = workload.run("llama_fsdp2", load_checkpoint=folder, **training | LAYOUTS[layout] | UNCHANGED)
        assert same.weight_hashes["1"] == saved.weight_hashes["3"], layout


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_trains_nearly_as_bfloat16(workload: WorkloadRunner, eager):
    float8 = workload.run("llama_fsdp2", float8_linear=True, **TRAINING | LAYOUTS["fsdp 4"])
    assert float8.weight_hashes["1"] != eager("fsdp 4").weight_hashes["1"]
    assert float8.loss == pytest.approx(eager("fsdp 4").loss, rel=2e-2)
