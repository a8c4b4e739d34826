"""Pipeline parallelism on CPU ranks: the same numerics as without stages."""

import pytest

from tests.distributed import TWO_CPU_RANKS

PP = {"pipeline_parallel_degree": 2, "gradient_accumulation": 2}
# Both worlds reduce gradients over two ranks. Only the order of the norm's sum differs, so without clipping no bit
# differs.
INNER = """
import json, pathlib, pytest

FOLDER = pathlib.Path(__file__).parent
KINDS = ["weights", "gradients", "optimizer"]
TRAINING = {
    "n_layers": 3, "warmup": 0, "steps": 3, "hash_every": 1, "hash_tensors": KINDS, "batch_size": 1,
    "gradient_accumulation": 3, "max_grad_norm": None, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16",
}
PP = {"pipeline_parallel_degree": 2}
WORKLOADS = {"llama_fsdp2": {"save_checkpoint": str(FOLDER / "saved")}, "llama_simple_fsdp": {"backend": "aot_eager"}}

pytestmark = pytest.mark.launch_timeout(150)

def bits(result):
    return {
        "loss": result.loss,
        "weights": result.weight_hashes,
        "tensors": {kind: [hashes.names, hashes.shapes, hashes.steps] for kind, hashes in result.tensor_hashes.items()},
    }

@pytest.mark.world(size=4, device="cpu")
@pytest.mark.parametrize("name", WORKLOADS)
def test_of_four(workload, name):
    result = workload.run(name, **TRAINING, **PP, **WORKLOADS[name])
    assert set(result.tensor_hashes) == set(KINDS)
    FOLDER.joinpath(f"{name}.json").write_text(json.dumps(bits(result) | {"norm": result.grad_norm}))

@pytest.mark.world(size=2, device="cpu")
@pytest.mark.parametrize("name", WORKLOADS)
def test_of_two(workload, name):
    stages = json.loads(FOLDER.joinpath(f"{name}.json").read_text())
    result = workload.run(name, **TRAINING, **(WORKLOADS[name] if name == "llama_simple_fsdp" else {}))
    assert result.grad_norm == pytest.approx(stages.pop("norm"), rel=1e-6)
    assert bits(result) == stages

@pytest.mark.world(size=2, device="cpu")
@pytest.mark.parametrize("axes", [{}, PP])
def test_loaded_by_two(workload, axes):
    unchanged = {"lr": 1e-60, "steps": 1, "load_checkpoint": str(FOLDER / "saved")}
    result = workload.run("llama_fsdp2", **TRAINING | axes | unchanged)
    stages = json.loads(FOLDER.joinpath("llama_fsdp2.json").read_text())
    assert result.weight_hashes["1"] == stages["weights"]["3"]
"""


@pytest.mark.extended
def test_stages_of_two_ranks_have_every_bit_of_two_ranks(inner, on_cpu):
    inner(INNER).assert_outcomes(passed=6)


# Without clipping, no bit depends on how stages divide the gradient norm.
TWO_STAGES = PP | {
    "size": "debug",
    "n_layers": 5,
    "gradient_accumulation": 4,
    "batch_size": 1,
    "steps": 3,
    "warmup": 0,
    "hash_every": 1,
    "hash_tensors": ["gradients"],
    "max_grad_norm": None,
    "param_dtype": "bfloat16",
}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
ZERO_BUBBLE = {"pipeline_parallel_schedule": "ZBVZeroBubble", "reshard_after_forward": False}
# The schedule adds up gradients of weights in param_dtype before it adds them to those in reduce_dtype.
ZERO_BUBBLE_IN_ONE_DTYPE = ZERO_BUBBLE | {"reduce_dtype": "bfloat16"}


def schedules():
    """Return layouts with two stages a rank; those of 4 ranks have another axis of 2 ranks."""
    for name, world_size, keys in (
        ("interleaved", 2, INTERLEAVED),
        ("zero bubble", 2, ZERO_BUBBLE_IN_ONE_DTYPE),
        ("interleaved, traced", 2, INTERLEAVED | {"workload": "llama_simple_fsdp"}),
        ("interleaved, reduced each time", 2, INTERLEAVED | {"reduce_every_micro_batch": True}),
        ("interleaved, resharded", 4, INTERLEAVED),
        ("interleaved, TP 2", 4, INTERLEAVED | {"tensor_parallel_degree": 2, "batch_size": 2}),
        ("interleaved, EP 2", 4, INTERLEAVED | {"num_experts": 4, "expert_parallel_degree": 2}),
        ("zero bubble, AC full", 2, ZERO_BUBBLE_IN_ONE_DTYPE | {"activation_checkpointing": "full"}),
        ("zero bubble, FSDP 2", 4, ZERO_BUBBLE_IN_ONE_DTYPE),
    ):
        marks = [pytest.mark.world(size=world_size, device="cpu", warm=True)]
        yield pytest.param(keys, id=name, marks=marks if name == "interleaved" else [*marks, pytest.mark.extended])


def with_1f1b(workload, keys):
    """Return the results of the given schedule, and of 1F1B in its place."""
    given = TWO_STAGES | keys
    name = given.pop("workload", "llama_fsdp2")
    return workload.run(name, **given), workload.run(name, **given | {"pipeline_parallel_schedule": "1F1B"})


@pytest.mark.numerics
@pytest.mark.launch_timeout(180)
@pytest.mark.parametrize("keys", list(schedules()))
def test_two_stages_a_rank_have_every_bit_of_one(workload, keys):
    result, reference = with_1f1b(workload, keys)
    assert result.loss == reference.loss
    assert result.weight_hashes == reference.weight_hashes
    assert result.tensor_hashes == reference.tensor_hashes
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-6)


@pytest.mark.extended
@pytest.mark.numerics
@TWO_CPU_RANKS
@pytest.mark.launch_timeout(180)
def test_a_zero_bubble_rounds_otherwise_if_gradients_are_reduced_in_another_dtype(workload):
    result, reference = with_1f1b(workload, ZERO_BUBBLE)
    assert result.loss[0] == reference.loss[0]
    assert result.weight_hashes != reference.weight_hashes
    assert result.loss == pytest.approx(reference.loss, rel=1e-3)
