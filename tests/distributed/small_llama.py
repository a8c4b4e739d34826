"""A Llama that is small for a GPU; tests of layouts and of attention kernels train it."""

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
