"""Llamas that are small for a GPU; tests of layouts, attention kernels and communication train them."""

from typing import Any

import pytest

SIZE: dict[str, Any] = {"size": "debug", "dim": 512, "n_heads": 8, "ffn_hidden": 1536, "seq_len": 256}

# Each step is hashed, the first one too.
TRAINING = SIZE | {"n_layers": 2, "n_kv_heads": 4, "warmup": 0, "hash_every": 1, "profile_steps": 0}

# Three blocks whose four query heads share each head of keys and values; the tests that use this config choose the
# hashed tensors.
THREE_BLOCKS = SIZE | {"n_layers": 3, "n_kv_heads": 2, "param_dtype": "bfloat16", "profile_steps": 0}


def trains_alike(workload, training, layouts, *, unchanged, rel_loss, rel_norm, saved=None):
    """Launch a model in several layouts: they begin with the same weights and train alike; return the results.

    Under the config ``unchanged``, AdamW changes no bit of a weight, so the hash is that of the first weights. Its
    checkpoints are kept in folders of ``saved``, by layout.
    """
    initial = {}
    for name, layout in layouts.items():
        kept = {} if saved is None else {"save_checkpoint": str(saved / name)}
        initial[name] = workload.run("llama_fsdp2", **training | layout | unchanged | kept).weight_hashes["1"]
    assert len(set(initial.values())) == 1, initial
    trained = {name: workload.run("llama_fsdp2", **training | layout) for name, layout in layouts.items()}
    reference = next(iter(trained.values()))
    assert list(reference.weight_hashes.values())[-1] not in initial.values()
    for name, result in trained.items():
        assert result.loss == pytest.approx(reference.loss, rel=rel_loss), name
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=rel_norm), name
    return trained
