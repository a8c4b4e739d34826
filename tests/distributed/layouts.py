"""The table of layouts: the bits of `llama_simple_fsdp` in each layout, with each backend.

`test_layouts.py` launches every cell that is declared here, and `docs/generate.py` writes the table of
docs/parallelism.md from the same declarations.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A row of the table: the keys of both workloads, in a world of `world_size` CPU ranks.

    `cells` holds the columns that are not equal, with the reason why bits differ; None is a cell that no test launches.
    `only_reference` holds keys that only `llama_fsdp2` has.
    """

    name: str
    world_size: int
    config: Mapping[str, Any]
    cells: Mapping[str, str | None] = field(default_factory=dict)
    in_ci: bool = False
    only_reference: Mapping[str, Any] = field(default_factory=dict)

    def difference(self, column: str) -> str | None:
        """Return why the bits of a column differ: empty if they are equal, None if no test launches the cell."""
        return self.cells.get(column, "")

    @property
    def reference(self) -> dict[str, Any]:
        """Return the keys of the launch of `llama_fsdp2`, which reduces as often as a traced model."""
        return dict(self.config) | {"reduce_every_micro_batch": True} | dict(self.only_reference)


COLUMNS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "aot_eager, none": {"bucketing": "none"},
    "aot_eager, transformer_block": {"bucketing": "transformer_block"},
    "aot_eager, step": {"trace": "step"},
    "aot_eager, manual": {"bucketing": "manual", "bucket_modules": ["tok_embeddings", "layers.[0-1]", "norm+output"]},
    "inductor": {"backend": "inductor"},
}
REFERENCE = "llama_fsdp2"
# The collectives of a step, by layout and workload.
COLLECTIVES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("collectives.json").read_text())
TRAINING: dict[str, Any] = {
    "size": "debug",
    "n_kv_heads": 4,
    "steps": 25,
    "warmup": 0,
    "profile_steps": 0,
    "hash_every": 1,
    "batch_size": 1,
}

_ROUNDS = "fused kernels round differently"
_NOT_RUN = {"inductor": None}
# A pipeline's stages run forward and backward of several micro-batches in turn.
_STAGES = _NOT_RUN | {"aot_eager, step": None}
# Ring all-reduces add an element in the order that its place in the buffer determines; two addends have one sum.
_ONE_BY_ONE = dict.fromkeys(["eager", "aot_eager, none"], "gradients are summed over replicas one by one")
_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
_EXPERTS = {"num_experts": 4}
_BIAS = {"load_balance_coeff": 0.01}
_OF_TWO = {"expert_parallel_degree": 2}
_EP = _EXPERTS | _OF_TWO
_TP = {"tensor_parallel_degree": 2}
_DEEPSEEK = {"size": "deepseek_debug", "n_layers": 2}
_PP = {"pipeline_parallel_degree": 2, "gradient_accumulation": 3}
_SELECTIVE, _FULL = {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}

LAYOUTS = (
    Layout("FSDP 2", 2, _BF16, {"inductor": _ROUNDS}),
    Layout("FSDP 2, float32", 2, {}, _NOT_RUN),
    Layout("FSDP 2, AC selective", 2, _BF16 | _SELECTIVE, _NOT_RUN),
    Layout("FSDP 2, AC elementwise", 2, _BF16 | {"activation_checkpointing": "elementwise"}, _NOT_RUN),
    Layout("FSDP 2, AC full", 2, _FULL, {"inductor": _ROUNDS}),
    Layout("FSDP 2, 2 micro-batches", 2, _BF16 | {"gradient_accumulation": 2}, _NOT_RUN),
    Layout("replicas 2", 2, _BF16 | {"data_parallel_replicate_degree": 2}, _NOT_RUN),
    Layout("replicas 3", 3, _BF16 | {"data_parallel_replicate_degree": 3}, _ONE_BY_ONE | _NOT_RUN),
    Layout("TP 2", 2, _BF16 | _TP, _NOT_RUN, in_ci=True),
    Layout("CP 2", 2, _BF16 | {"context_parallel_degree": 2}, _NOT_RUN),
    Layout("PP 2", 2, _BF16 | _PP, _STAGES),
    Layout("4 experts, FSDP 2, float32", 2, _EXPERTS, _NOT_RUN),
    Layout("4 experts, EP 2", 2, _EP | _BF16, _NOT_RUN),
    Layout("4 experts, EP 2, float32", 2, _EP, {"inductor": _ROUNDS}),
    Layout("4 experts, EP 2, AC selective", 2, _EP | _BF16 | _SELECTIVE, _NOT_RUN),
    Layout("4 experts, EP 2, AC selective, float32", 2, _EP | _SELECTIVE, _NOT_RUN),
    Layout("4 experts, EP 2, AC full", 2, _EP | _FULL, _NOT_RUN),
    Layout("4 experts, EP 2, prefetched", 2, _EP | _BF16, _NOT_RUN, only_reference={"forward_prefetch": 1}),
    Layout("4 experts, EP 2, in turn", 2, _EP | _BF16 | {"moe_force_load_balance": True}, _NOT_RUN),
    Layout("4 experts, EP 2, AC full, bias", 2, _EP | _FULL | _BIAS, _NOT_RUN),
    Layout("4 experts, TP 2, bias", 2, _EXPERTS | _BF16 | _TP | _BIAS, _NOT_RUN),
    Layout("4 experts, TP 2", 2, _EXPERTS | _BF16 | _TP, _NOT_RUN),
    Layout("4 experts, TP 2, AC full, float32", 2, _EXPERTS | _FULL | _TP, _NOT_RUN),
    Layout("DeepSeek, FSDP 2", 2, _DEEPSEEK | _BF16, {"inductor": _ROUNDS}),
    Layout("DeepSeek, EP 2, float32", 2, _DEEPSEEK | _OF_TWO, _NOT_RUN),
    Layout("DeepSeek, EP 2, AC selective", 2, _DEEPSEEK | _OF_TWO | _BF16 | _SELECTIVE, _NOT_RUN),
    Layout("DeepSeek, EP 2, AC full", 2, _DEEPSEEK | _OF_TWO | _FULL, _NOT_RUN),
    Layout("DeepSeek, TP 2", 2, _DEEPSEEK | _BF16 | _TP, _NOT_RUN),
    Layout("DeepSeek, TP 2, AC selective, float32", 2, _DEEPSEEK | _SELECTIVE | _TP, _NOT_RUN),
    Layout("DeepSeek, CP 2", 2, _DEEPSEEK | _BF16 | {"context_parallel_degree": 2}, _NOT_RUN),
    Layout("HSDP 2x2", 4, _BF16 | {"data_parallel_replicate_degree": 2}, _NOT_RUN),
    Layout("FSDP 2, TP 2", 4, _BF16 | _TP, _NOT_RUN),
    Layout("FSDP 2, CP 2", 4, _BF16 | {"context_parallel_degree": 2}, _NOT_RUN),
    Layout("PP 2, FSDP 2", 4, _BF16 | _PP, _STAGES),
    Layout("PP 2, TP 2", 4, _BF16 | _PP | _TP, _STAGES),
    Layout("PP 2, CP 2", 4, _BF16 | _PP | {"context_parallel_degree": 2}, _STAGES),
    Layout("PP 2, replicas 2", 4, _BF16 | _PP | {"data_parallel_replicate_degree": 2}, _STAGES),
    Layout("PP 2, 4 experts, EP 2", 4, _BF16 | _PP | _EP, _STAGES),
    Layout("PP 2, 4 experts, EP 2, AC selective", 4, _PP | _EP | _SELECTIVE, _STAGES),
    Layout("PP 2, 4 experts, EP 2, bias", 4, _BF16 | _PP | _EP | _BIAS, _STAGES),
    Layout("4 experts, FSDP 2 x EP 2", 4, _EP | _BF16, _NOT_RUN),
    Layout("2 experts, each sharded over 2 ranks, EP 2", 4, _EP | {"num_experts": 2}, _NOT_RUN),
    Layout("4 experts, HSDP 2 with EP 2", 4, _EP | _BF16 | {"data_parallel_replicate_degree": 2}, _NOT_RUN),
    Layout(
        "4 experts, CP 2 with EP 4",
        4,
        _EXPERTS | _BF16 | {"context_parallel_degree": 2, "expert_parallel_degree": 4},
        _NOT_RUN,
    ),
    Layout(
        "DeepSeek, HSDP 2 with EP 2", 4, _DEEPSEEK | _OF_TWO | _BF16 | {"data_parallel_replicate_degree": 2}, _NOT_RUN
    ),
    Layout("4 experts, FSDP 2, TP 2", 4, _EXPERTS | _BF16 | _TP, _NOT_RUN),
    Layout("4 experts, EP 2 with TP 2", 4, _EP | _BF16 | _TP, _NOT_RUN),
    Layout("4 experts, EP 2 with TP 2, AC full, float32", 4, _EP | _FULL | _TP, _NOT_RUN),
    Layout("DeepSeek, EP 2 with TP 2", 4, _DEEPSEEK | _OF_TWO | _BF16 | _TP, _NOT_RUN),
    Layout("DeepSeek, FSDP 2, TP 2", 4, _DEEPSEEK | _BF16 | _TP, _NOT_RUN),
    Layout("DeepSeek, CP 2, TP 2", 4, _DEEPSEEK | _BF16 | _TP | {"context_parallel_degree": 2}, _NOT_RUN),
    Layout("DeepSeek, PP 2, TP 2", 4, _DEEPSEEK | _BF16 | _TP | _PP, _STAGES),
    Layout("DeepSeek, PP 2, EP 2", 4, _DEEPSEEK | _OF_TWO | _BF16 | _PP, _STAGES),
)
