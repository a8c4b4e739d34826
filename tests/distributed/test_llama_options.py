"""Options of the Llama workloads that move work about keep every bit; planted faults do not."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

TRAINING = {"size": "debug", "steps": 3, "warmup": 0, "hash_every": 1}
MOVED = {
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "kept parameters": {"reshard_after_forward": False},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": {"activation_checkpointing": "full"},
}


def test_options_that_move_work_keep_every_bit(workload):
    plain = workload.run("llama_fsdp2", **TRAINING)
    for name, options in MOVED.items():
        moved = workload.run("llama_fsdp2", **TRAINING, **options)
        assert (moved.weight_hashes, moved.loss) == (plain.weight_hashes, plain.loss), name


def test_micro_batches_that_reduce_each_have_the_same_bits_traced_and_eager(workload):
    training = TRAINING | {"gradient_accumulation": 2, "activation_checkpointing": "selective", "max_grad_norm": None}
    eager = workload.run("llama_fsdp2", reduce_every_micro_batch=True, **training)
    traced = workload.run("llama_simple_fsdp", **training)

    assert traced.weight_hashes == eager.weight_hashes
    assert (traced.loss, traced.grad_norm) == (eager.loss, eager.grad_norm)


def test_compiled_blocks_and_fused_adamw_train_alike(workload):
    training = TRAINING | {"n_layers": 1}
    eager = workload.run("llama_fsdp2", **training)
    compiled = workload.run("llama_fsdp2", compile_blocks=True, optimizer_fused=True, **training)

    assert compiled.loss == pytest.approx(eager.loss, rel=1e-5)
    assert compiled.weight_hashes != eager.weight_hashes


FAULTS = [
    ("llama_fsdp2", "weight_ulp", {}),
    ("llama_fsdp2", "swap_shards", {}),
    ("llama_fsdp2", "drop_gradient", {}),
    # Plain eager compiles fastest.
    ("llama_simple_fsdp", "drop_gradient", {"backend": "eager"}),
]


def test_a_planted_fault_changes_the_weights_from_its_step_on(workload):
    plain = workload.run("llama_fsdp2", **TRAINING)
    for name, kind, more in FAULTS:
        faulty = workload.run(name, fault={"kind": kind, "step": 2, "rank": 1}, **TRAINING, **more)
        equal = {step for step, value in plain.weight_hashes.items() if faulty.weight_hashes[step] == value}
        assert equal == {"1"}, (name, kind)
