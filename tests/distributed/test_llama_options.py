"""Options of the Llama workloads that change when work runs but not its results."""

import pytest

from tests.distributed import TWO_CPU_RANKS

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS]

STEPS = 3
TRAINING = {"size": "debug"}
HASHED = TRAINING | {"steps": STEPS, "warmup": 0, "hash_every": 1}
MOVED = {
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "kept parameters": {"reshard_after_forward": False},
    "one bucket of two blocks": {"blocks_per_bucket": 2},
    "real freqs_cis": {"rotary": "real"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": {"activation_checkpointing": "full"},
    "hashes of all tensors": {"hash_tensors": ["weights", "gradients", "optimizer"]},
}
TOGETHER = (
    ("prefetch", "one bucket of two blocks", "real freqs_cis", "selective checkpointing"),
    ("kept parameters", "hashes of all tensors"),
    ("full checkpointing",),
)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(TOGETHER, id="together"),
        pytest.param([(label,) for label in MOVED], id="each alone", marks=pytest.mark.extended),
    ],
)
def test_options_that_move_work_keep_every_bit(workload, groups):
    plain = workload.run("llama_fsdp2", **HASHED)
    for labels in groups:
        options = {key: value for label in labels for key, value in MOVED[label].items()}
        workload.compare({"workload": "llama_fsdp2"} | TRAINING | options, plain, steps=STEPS, label=", ".join(labels))


@pytest.mark.extended
def test_buckets_of_several_blocks_have_every_bit_in_both_implementations(workload):
    keys = {"n_layers": 3, "blocks_per_bucket": 2, "rotary": "real"}
    plain = workload.run("llama_fsdp2", **HASHED | {"n_layers": 3})
    for implementation in ("llama_fsdp2", "llama_simple_fsdp"):
        workload.compare({"workload": implementation} | TRAINING | keys, plain, steps=STEPS, label=implementation)


def calls(result):
    """Return how often rank 0 gathers parameters and reduces gradients in a profiled step."""
    kinds = ("all_gather", "reduce_scatter")
    return tuple(sum(len(one.ms) for one in result.collectives[0] if one.kind == kind) for kind in kinds)


@pytest.mark.parametrize(
    "implementation", ["llama_fsdp2", pytest.param("llama_simple_fsdp", marks=pytest.mark.extended)]
)
def test_buckets_of_several_blocks_merge_collectives(workload, implementation):
    keys = TRAINING | {"n_layers": 4, "steps": 1, "warmup": 1, "profile_steps": 1}
    gathers, reductions = calls(workload.run(implementation, **keys))
    # Two buckets instead of four gather twice each, and reduce once.
    assert calls(workload.run(implementation, blocks_per_bucket=2, **keys)) == (gathers - 4, reductions - 2)


@pytest.mark.extended
def test_compiled_blocks_and_adamw_train_alike(workload):
    eager = workload.run("llama_fsdp2", n_layers=1, **HASHED)
    compiled = workload.run("llama_fsdp2", n_layers=1, compile_blocks=True, optimizer="compiled", **HASHED)

    assert compiled.loss == pytest.approx(eager.loss, rel=1e-5)
    assert compiled.weight_hashes != eager.weight_hashes


@pytest.mark.extended
def test_compiled_adamw_keeps_the_bits_of_both_programs_alike(workload):
    training = HASHED | {"optimizer": "compiled"}
    eager = workload.run("llama_fsdp2", **training)
    workload.compare({"workload": "llama_simple_fsdp"} | training, eager, steps=STEPS, label="aot_eager")


def test_unfused_adamw_ties_hashes_on_cpu_to_the_vendor(workload):
    fused = workload.run("llama_fsdp2", n_layers=1, **TRAINING | {"steps": 1, "warmup": 0})
    unfused = workload.run("llama_fsdp2", n_layers=1, optimizer="unfused", **TRAINING | {"steps": 1, "warmup": 0})
    assert "cpu_vendor" in unfused.environment
    # If the host does not allow pinned kernels, no CPU hash is portable.
    assert ("cpu_vendor" in fused.environment) is (fused.environment["cpu_kernels"] is None)
