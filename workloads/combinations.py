"""The combinations of config keys that the Llama workloads refuse, as a table."""

from collections.abc import Mapping
from typing import Any

from .common.rules import ABSOLUTE, CHECKPOINT_RULES, Rule, check_rules, is_relative
from .models.config import MixtureConfig


def check_combinations(workload: str, config: Mapping[str, Any], *, device: str, ranks: int) -> None:
    """Raise ValueError for the first rule that a launch of ``ranks`` on ``device`` breaks.

    The message has the rule's keys with their values, and the reason.
    """
    given = {**config, "device": device, "ranks": ranks}
    check_rules((*_SHARED, *CHECKPOINT_RULES, *_OWN[workload]), given)


def _has_boundaries(kinds: list[str]) -> bool:
    return not {"forward", "backward"}.isdisjoint(kinds)


def _stages(c: Any) -> int:
    return int(c.pipeline_parallel_degree * (1 if c.pipeline_parallel_schedule == "1F1B" else 2))


def _is_zero_bubble(c: Any) -> bool:
    return bool(c.pipeline_parallel_schedule == "ZBVZeroBubble")


def _odd_for_float8(c: Any) -> bool:
    positions = c.batch_size * c.seq_len // c.context_parallel_degree
    return any(size % 16 for size in (c.dim, c.n_kv_heads * (c.dim // c.n_heads), c.ffn_hidden, positions))


def _odd_for_experts(c: Any) -> bool:
    """Return whether a stride is no multiple of 16 bytes, which torch's grouped matrix products need."""
    multiple = 16 // {"float32": 4, "bfloat16": 2}[c.param_dtype]
    width = c.moe_inter_dim or c.ffn_hidden
    return bool(c.num_experts and (c.dim % multiple or width // c.tensor_parallel_degree % multiple))


_ONE_GRAPH = "forward, loss and backward are one graph"
_REPLAYED = "a step replays the kernels of one captured run"


def _splits_evenly(key: str) -> Rule:
    """Return the rule that ranks of tensor parallelism split the value of ``key``, which may be null, evenly."""
    reason = "ranks of tensor parallelism split it evenly; use a multiple"
    return f"tensor_parallel_degree {key}", lambda c: (getattr(c, key) or 0) % c.tensor_parallel_degree, reason


# fmt: off
_SHARED: tuple[Rule, ...] = (
    ("n_heads n_kv_heads", lambda c: c.n_heads % c.n_kv_heads, "equal groups of query heads share heads of keys"),
    ("dim n_heads", lambda c: c.dim % (2 * c.n_heads), "rotary positions turn pairs; use a multiple of 2 x n_heads"),
    ("kv_lora_rank q_lora_rank qk_rope_head_dim",
     lambda c: not c.kv_lora_rank and (c.q_lora_rank or c.qk_rope_head_dim), "grouped-query attention has neither"),
    ("kv_lora_rank qk_rope_head_dim", lambda c: c.kv_lora_rank and (c.qk_rope_head_dim % 2 or not c.qk_rope_head_dim),
     "latent attention rotates pairs; allowed are multiples of 2, from 2 on"),
    ("kv_lora_rank float8_linear", lambda c: c.kv_lora_rank and c.float8_linear, "its projections are not converted"),
    # Axes
    ("context_parallel_degree seq_len",
     lambda c: c.context_parallel_degree > 1 and c.seq_len % (2 * c.context_parallel_degree),
     "each rank takes two chunks; seq_len is a multiple of 2 x context_parallel_degree"),
    *map(_splits_evenly, ("n_heads", "n_kv_heads", "ffn_hidden", "moe_inter_dim", "vocab_size")),
    ("tensor_parallel_degree context_parallel_degree seq_len",
     lambda c: c.seq_len // c.context_parallel_degree % c.tensor_parallel_degree,
     "ranks of tensor parallelism split a rank's positions evenly; use a multiple"),
    ("async_tensor_parallel tensor_parallel_degree",
     lambda c: c.async_tensor_parallel and c.tensor_parallel_degree == 1,
     "no activations are exchanged; use a degree of 2 or more"),
    ("async_tensor_parallel device", lambda c: c.async_tensor_parallel and c.device != "cuda",
     "divided products write into memory of other GPUs"),
    # Pipelines
    ("pipeline_parallel_schedule pipeline_parallel_degree",
     lambda c: c.pipeline_parallel_schedule != "1F1B" and c.pipeline_parallel_degree == 1,
     "there are no stages; use a degree of 2 or more"),
    ("pipeline_parallel_degree pipeline_parallel_schedule n_layers",
     lambda c: c.pipeline_parallel_degree > 1 and _stages(c) > c.n_layers,
     "each stage holds at least one block; 1F1B has a stage per rank, the others have two"),
    ("pipeline_parallel_degree gradient_accumulation", lambda c: c.gradient_accumulation < c.pipeline_parallel_degree,
     "a schedule takes at least as many micro-batches as ranks"),
    ("pipeline_parallel_schedule pipeline_parallel_degree gradient_accumulation",
     lambda c: c.pipeline_parallel_schedule == "Interleaved1F1B"
     and c.gradient_accumulation % (c.gradient_accumulation // c.pipeline_parallel_degree),
     "micro-batches // ranks is the number of rounds, which have equally many micro-batches"),
    ("pipeline_parallel_schedule activation_checkpointing",
     lambda c: _is_zero_bubble(c) and c.activation_checkpointing in ("elementwise", "selective"),
     "a saved tensor would be read twice, which torch does not allow; use none or full"),
    ("pipeline_parallel_schedule activation_checkpointing",
     lambda c: c.pipeline_parallel_schedule != "1F1B" and c.activation_checkpointing == "auto",
     "memory is estimated for 1F1B only; name a kind"),
    ("pipeline_parallel_degree hash_tensors",
     lambda c: c.pipeline_parallel_degree > 1 and _has_boundaries(c.hash_tensors),
     "passes of several micro-batches run in turn, and a boundary is attributed to the one that runs"),
    ("pipeline_parallel_degree fault",
     lambda c: c.pipeline_parallel_degree > 1 and c.fault.get("kind") == "drop_gradient",
     "gradients are dropped at the loss, and only the last stage has a loss"),
    # Experts
    ("expert_parallel_degree num_experts", lambda c: c.expert_parallel_degree > 1 and not c.num_experts,
     "there are no experts to distribute"),
    (f"num_experts {' '.join(vars(MixtureConfig()))}",
     lambda c: not c.num_experts and any(getattr(c, key) != value for key, value in vars(MixtureConfig()).items()),
     "there are no experts for the other keys"),
    ("top_k num_experts", lambda c: c.num_experts and c.top_k > c.num_experts, "a token goes to different experts"),
    ("num_experts expert_parallel_degree", lambda c: c.num_experts % c.expert_parallel_degree,
     "ranks hold equally many experts; use a multiple"),
    ("num_experts float8_linear", lambda c: c.num_experts and c.float8_linear,
     "experts are not linear layers, and a rounded router would choose others; use one of the two"),
    ("moe_force_load_balance load_balance_coeff",
     lambda c: c.moe_force_load_balance and c.load_balance_coeff is not None,
     "tokens go to experts in turn, whatever the bias; use one of the two"),
    ("n_dense_layers n_layers", lambda c: c.num_experts and c.n_dense_layers >= c.n_layers,
     "no block has experts; use fewer, or num_experts 0"),
    ("n_dense_layers activation_checkpointing",
     lambda c: c.num_experts and c.n_dense_layers and c.activation_checkpointing == "auto",
     "memory is estimated for equal blocks; name a kind"),
    ("param_dtype tensor_parallel_degree dim ffn_hidden moe_inter_dim", _odd_for_experts,
     "dim, and each rank's part of an expert's width, are multiples of 16 bytes"),
    # Numbers
    ("float8_recipe float8_linear", lambda c: c.float8_recipe != "tensorwise" and not c.float8_linear,
     "nothing is computed in float8; set float8_linear"),
    ("float8_output float8_linear loss_chunks", lambda c: c.float8_output and (not c.float8_linear or c.loss_chunks),
     "float8 layers return whole logits; set float8_linear, and loss_chunks 0"),
    ("float8_output vocab_size", lambda c: c.float8_output and c.vocab_size % 16, "use a multiple of 16"),
    ("float8_linear tensor_parallel_degree", lambda c: c.float8_linear and c.tensor_parallel_degree > 1,
     "torchao splits float8 layers with styles of its own; use one of the two"),
    ("float8_linear dim n_heads n_kv_heads ffn_hidden batch_size seq_len context_parallel_degree",
     lambda c: c.float8_linear and _odd_for_float8(c),
     "dim, n_kv_heads x dim / n_heads, ffn_hidden and a rank's tokens of a micro-batch are multiples of 16"),
    ("fill_uninitialized_memory deterministic", lambda c: c.fill_uninitialized_memory and not c.deterministic,
     "torch fills new tensors only under deterministic algorithms; use both or neither"),
    ("loss_chunks pipeline_parallel_degree", lambda c: c.loss_chunks and c.pipeline_parallel_degree > 1,
     "torch computes the loss from the logits of the last stage; use loss_chunks 0"),
    ("memory_budget_bytes activation_checkpointing",
     lambda c: c.memory_budget_bytes is not None and c.activation_checkpointing != "auto",
     "only auto keeps to a budget"),
    # Hashes
    ("hash_operators_step steps", lambda c: (c.hash_operators_step or 0) > c.steps, "this step is not measured"),
    ("hash_tensors_step steps", lambda c: (c.hash_tensors_step or 0) > c.steps, "this step is not measured"),
    ("hash_tensors_step hash_tensors", lambda c: c.hash_tensors_step and not c.hash_tensors,
     "name the kinds to hash in that step"),
)
_OWN: dict[str, tuple[Rule, ...]] = {
    "llama_fsdp2": (
        ("pipeline_parallel_schedule reshard_after_forward reduce_every_micro_batch compile_blocks",
         lambda c: _is_zero_bubble(c) and (c.reshard_after_forward or c.reduce_every_micro_batch or c.compile_blocks),
         "torch divides each backward pass in autograd, with parameters that stay gathered; set all three to false"),
        ("async_tensor_parallel compile_blocks", lambda c: c.async_tensor_parallel and not c.compile_blocks,
         "inductor divides products and their collectives; set compile_blocks"),
        ("async_tensor_parallel all_gather", lambda c: c.async_tensor_parallel and c.all_gather != "default",
         "a process has one backend of symmetric memory, and the two need different ones; use one of the two"),
        ("expert_parallel_degree all_gather", lambda c: c.expert_parallel_degree > 1 and c.all_gather != "default",
         "experts are gathered over ranks of their own, which have no symmetric memory; use default"),
        ("all_gather device", lambda c: c.all_gather != "default" and c.device != "cuda",
         "symmetric memory is that of CUDA devices"),
    ),
    "llama_simple_fsdp": (
        ("pipeline_parallel_schedule", _is_zero_bubble,
         "autograd would divide each backward pass, which is one graph; use 1F1B or Interleaved1F1B"),
        ("async_tensor_parallel backend", lambda c: c.async_tensor_parallel and c.backend != "inductor",
         "inductor divides products and their collectives; use inductor"),
        ("blocks_per_bucket bucketing", lambda c: c.blocks_per_bucket > 1 and c.bucketing != "transformer_block",
         "buckets of blocks are those of transformer_block"),
        ("backend bucketing overlap_reorder reshard_after_forward",
         lambda c: c.backend == "eager" and (c.bucketing != "none" or c.overlap_reorder or c.reshard_after_forward),
         "eager runs no graph passes; use none, false and false"),
        ("bucketing bucket_modules", lambda c: (c.bucketing == "manual") != bool(c.bucket_modules),
         "groups are given for manual bucketing, and only for it"),
        ("overlap_reorder_modules overlap_reorder bucketing",
         lambda c: c.overlap_reorder_modules and (not c.overlap_reorder or c.bucketing in ("none", "auto")),
         "modules choose among buckets that are reordered; use overlap_reorder with transformer_block or manual"),
        ("bucketing bucket_order overlap_reorder",
         lambda c: c.bucketing == "auto" and (c.bucket_order != "graph" or not c.overlap_reorder),
         "auto reorders, and packs buckets in graph order"),
        ("context_parallel_degree bucketing overlap_reorder",
         lambda c: c.context_parallel_degree > 1 and c.overlap_reorder and c.bucketing in ("none", "auto"),
         "collectives are ordered by estimated times, which differ where ranks attend to more of a sequence"),
        ("dump_graphs", lambda c: is_relative(c.dump_graphs), ABSOLUTE),
        ("trace backend", lambda c: c.trace == "step" and c.backend == "eager", "no graph computes the gradients"),
        ("trace pipeline_parallel_degree", lambda c: c.trace == "step" and c.pipeline_parallel_degree > 1, _ONE_GRAPH),
        ("trace compile_loss", lambda c: c.trace == "step" and c.compile_loss, _ONE_GRAPH),
        ("trace hash_operators_step", lambda c: c.trace == "step" and c.hash_operators_step, _ONE_GRAPH),
        ("trace hash_tensors", lambda c: c.trace == "step" and _has_boundaries(c.hash_tensors), _ONE_GRAPH),
        ("trace fault", lambda c: c.trace == "step" and c.fault.get("kind") == "drop_gradient", _ONE_GRAPH),
        ("cuda_graphs trace backend", lambda c: c.cuda_graphs and (c.trace, c.backend) != ("step", "aot_eager"),
         "the graph of a whole step is captured; use trace step and backend aot_eager"),
        ("cuda_graphs device ranks", lambda c: c.cuda_graphs and (c.device, c.ranks) != ("cuda", 1),
         "a captured step has no collectives; use one rank on a CUDA device"),
        ("cuda_graphs gradient_accumulation", lambda c: c.cuda_graphs and c.gradient_accumulation > 1, _REPLAYED),
        ("cuda_graphs num_experts", lambda c: c.cuda_graphs and c.num_experts, _REPLAYED),
        ("cuda_graphs fault",
         lambda c: c.cuda_graphs and c.fault.get("kind") in ("operator_output", "operator_input"), _REPLAYED),
    ),
}
# fmt: on
