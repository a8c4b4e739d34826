"""Records launches for benchmarks/verdict/detection.py: some unchanged, some with a real slowdown planted.

Run: RECORD_ROUNDS=10 RECORD_OUT=DIR python -m pytest benchmarks/verdict/record_launches.py -s
RECORD_VARIANTS picks some of the variants, RECORD_LIMIT_S ends the run early, RECORD_SEQ_LEN sets the work of a GPU
step of llama_fsdp2, RECORD_STEPS the measured steps; RECORD_WORKLOAD=fsdp records the other workload.
Each run is a session block; its file is DIR/launches-<workload>-<platform>-<block>.json.gz.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pytest_aorta import DistributedWorld
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.provenance import block_id

SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("llama_fsdp2", "cpu"): {"steps": 120, "warmup": 10},
    ("fsdp", "cpu"): {"steps": 120, "warmup": 10, "verify": 0},
    ("fsdp", "cuda"): {
        "steps": 200,
        "warmup": 20,
        "verify": 0,
        "layers": 16,
        "gemm_size": 4096,
        "fsdp_shard_size": 1 << 23,
        "h2d_tensor_size": 1 << 25,
        "dtype": "bfloat16",
    },
    ("llama_fsdp2", "cuda"): {
        "steps": 160,
        "warmup": 15,
        "dim": 2048,
        "n_layers": 4,
        "n_heads": 16,
        "n_kv_heads": 4,
        "ffn_hidden": 8192,
        "vocab_size": 32000,
        "seq_len": int(os.environ.get("RECORD_SEQ_LEN", "2048")),
        "batch_size": 1,
        "param_dtype": "bfloat16",
    },
}
EVERY = {"every": 1, "rank": None}
STALL = {"every": 50, "rank": None}
# Delay in percent of the unchanged median step, or in milliseconds; unchanged launches separate changed launches.
VARIANTS: dict[str, tuple[float, str, dict[str, Any]]] = {
    "base": (0, "%", {}),
    "slow0.5": (0.5, "%", EVERY),
    "slow1": (1, "%", EVERY),
    "slow2": (2, "%", EVERY),
    "slow5": (5, "%", EVERY),
    "slow20": (20, "%", EVERY),
    "stall10": (10, "%", STALL),
    "stall25": (25, "%", STALL),
    "stall50": (50, "%", STALL),
    "rank1": (1, "ms", {"every": 1, "rank": 1}),
    "untimed": (0, "%", {}),
}


@pytest.mark.world(size="all", warm=True)
def test_record(distributed_world: DistributedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch every variant in each round, and write all launches so far after every round."""
    rounds, limit_s = int(os.environ.get("RECORD_ROUNDS", "2")), float(os.environ.get("RECORD_LIMIT_S", "1e9"))
    names = os.environ.get("RECORD_VARIANTS", "base,slow1,base,slow5").split(",")
    workload, began_s = os.environ.get("RECORD_WORKLOAD", "llama_fsdp2"), time.monotonic()
    size = SIZES[workload, distributed_world.device]
    size = size | {"steps": int(os.environ.get("RECORD_STEPS", size["steps"]))}
    first = distributed_world.run(workload, **size)
    base_ms = median(first.step_times_ms)
    launches: list[dict[str, Any]] = []
    for _ in range(rounds):
        for name in names:
            amount, unit, where = VARIANTS[name]
            delay_ms = amount if unit == "ms" else base_ms * amount / 100
            fault = {"kind": "slowdown", "delay_ms": delay_ms, **where} if amount else {}
            monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "0" if name == "untimed" else "1")
            launches.append(_compact(name, delay_ms, distributed_world.run(workload, **size, fault=fault)))
            if time.monotonic() - began_s > limit_s:
                break
        _write(distributed_world.platform, workload, size, base_ms, launches)
        if time.monotonic() - began_s > limit_s:
            break


def _compact(variant: str, delay_ms: float, result: WorkloadResult) -> dict[str, Any]:
    mean_ms = [sum(times) / len(times) for times in result.rank_step_times_ms]
    print(
        f"{variant:8} p50 {median(result.step_times_ms):8.4f} ms, ranks {[f'{ms:.3f}' for ms in mean_ms]}, waits "
        f"{[f'{median(waits):.3f}' for waits in result.collective_ms if waits]} of {len(result.collective_ms[0])}, "
        f"wall {result.launch_times_s['wall']:.2f} s",
        flush=True,
    )
    return {
        "variant": variant,
        "delay_ms": delay_ms,
        "at_s": round(time.time(), 1),
        "step_ms": [[round(value, 4) for value in times] for times in result.rank_step_times_ms],
        "wait_ms": [[round(value, 4) for value in times] for times in result.collective_ms],
        "memory_bytes": result.memory_bytes[0],
        "wall_s": round(result.launch_times_s["wall"], 3),
    }


def _write(platform: str, workload: str, size: dict[str, Any], base_ms: float, launches: list[dict[str, Any]]) -> None:
    path = Path(os.environ.get("RECORD_OUT", ".")) / f"launches-{workload}-{platform}-{block_id()}.json.gz"
    document = {
        "platform": platform,
        "block": block_id(),
        "workload": workload,
        "config": size,
        "base_ms": base_ms,
        "launches": launches,
    }
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
