"""Llamas that are small for a GPU; tests of layouts, attention kernels and communication train them."""

from __future__ import annotations

from typing import Any

# Each step is hashed, the first one too.
TRAINING: dict[str, Any] = {
    "size": "debug",
    "dim": 512,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_hidden": 1536,
    "seq_len": 256,
    "warmup": 0,
    "hash_every": 1,
}

# Three blocks whose four query heads share each head of keys and values; the tests that use this config choose the
# hashed tensors.
THREE_BLOCKS: dict[str, Any] = {
    "size": "debug",
    "dim": 512,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_hidden": 1536,
    "seq_len": 256,
    "param_dtype": "bfloat16",
}
