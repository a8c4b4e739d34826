"""Options of the Llama workloads that change when work runs but not its results."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

STEPS = 3
TRAINING = {"size": "debug"}
HASHED = TRAINING | {"steps": STEPS, "warmup": 0, "hash_every": 1}
MOVED = {
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "kept parameters": {"reshard_after_forward": False},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": {"activation_checkpointing": "full"},
    "hashes of all tensors": {"hash_tensors": ["weights", "gradients", "optimizer", "forward", "backward"]},
}


def test_options_that_move_work_keep_every_bit(workload):
    plain = workload.run("llama_fsdp2", **HASHED)
    for label, options in MOVED.items():
        workload.compare({"workload": "llama_fsdp2"} | TRAINING | options, plain, steps=STEPS, label=label)


@pytest.mark.extended
def test_compiled_blocks_and_fused_adamw_train_alike(workload):
    eager = workload.run("llama_fsdp2", n_layers=1, **HASHED)
    compiled = workload.run("llama_fsdp2", n_layers=1, compile_blocks=True, optimizer_fused=True, **HASHED)

    assert compiled.loss == pytest.approx(eager.loss, rel=1e-5)
    assert compiled.weight_hashes != eager.weight_hashes


def test_unfused_adamw_ties_hashes_on_cpu_to_the_vendor(workload):
    fused = workload.run("llama_fsdp2", n_layers=1, **TRAINING | {"steps": 1, "warmup": 0})
    unfused = workload.run("llama_fsdp2", n_layers=1, optimizer_fused=False, **TRAINING | {"steps": 1, "warmup": 0})
    assert "cpu_vendor" in unfused.environment
    # Where the host does not allow pinned kernels, no CPU hash is portable.
    assert ("cpu_vendor" in fused.environment) is (fused.environment["cpu_kernels"] is None)
