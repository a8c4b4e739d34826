"""Combinations of keys that the Llama workloads refuse; each message begins with the keys and their values."""

import warnings

import pytest
from aorta_workloads.common.rules import check_rules
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings

from tests.distributed.layouts import COLUMNS, LAYOUTS
from tests.rank.settings import default_config, make_settings

with warnings.catch_warnings():
    # Inductor's own imports warn.
    warnings.simplefilter("ignore", DeprecationWarning)
    from aorta_workloads.llama_simple_fsdp.settings import LlamaSimpleFsdpSettings

FSDP2, SIMPLE = "llama_fsdp2", "llama_simple_fsdp"
SETTINGS = {FSDP2: LlamaFsdp2Settings, SIMPLE: LlamaSimpleFsdpSettings}
EAGER = {"backend": "eager"}
STEP, CAPTURED = {"trace": "step"}, {"trace": "step", "cuda_graphs": True}
EXPERTS, LATENT = {"num_experts": 4}, {"kv_lora_rank": 16, "qk_rope_head_dim": 4}
ASYNC = {"async_tensor_parallel": True, "tensor_parallel_degree": 2}
FLOAT8 = {"float8_linear": True, "n_kv_heads": 4}
PP = {"n_layers": 4, "gradient_accumulation": 4, "pipeline_parallel_degree": 4}
TWO_STAGES = PP | {"n_layers": 8, "reshard_after_forward": False}
INTERLEAVED = TWO_STAGES | {"pipeline_parallel_schedule": "Interleaved1F1B"}
ZERO_BUBBLE = TWO_STAGES | {"pipeline_parallel_schedule": "ZBVZeroBubble"}
ON_GPU = {"device": "cuda", "ranks": 1}


def check(workload, device="cpu", ranks=8, **keys):
    settings = make_settings(SETTINGS[workload], workload, **keys)
    given = {**default_config(workload, **keys), "device": device, "ranks": ranks}
    check_rules(settings.rules(device, ranks), given)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_of_the_table_is_allowed(layout):
    check(FSDP2, **layout.reference)
    for column in COLUMNS:
        if layout.difference(column) is not None:
            check(SIMPLE, **dict(layout.config) | COLUMNS[column])


@pytest.mark.parametrize(
    ("workload", "keys"),
    [
        (FSDP2, INTERLEAVED),
        (FSDP2, ZERO_BUBBLE),
        (FSDP2, PP | {"hash_tensors": ["weights", "gradients", "optimizer"]}),
        (SIMPLE, {"context_parallel_degree": 2}),
        (SIMPLE, {"bucketing": "auto"}),
        (SIMPLE, {"bucketing": "none", "overlap_reorder": True}),
        (FSDP2, FLOAT8),
        (FSDP2, {"seq_len": 3}),
        (SIMPLE, CAPTURED | ON_GPU),
        (FSDP2, ASYNC | ON_GPU | {"compile_blocks": True}),
        (FSDP2, ON_GPU | {"all_gather": "symmetric"}),
    ],
)
def test_other_combinations_are_allowed(workload, keys):
    check(workload, **keys)


REFUSED = [
    (FSDP2, {"memory_budget_bytes": 1}, "memory_budget_bytes is 1 and activation_checkpointing is 'none'"),
    (FSDP2, INTERLEAVED | {"activation_checkpointing": "auto"}, "and activation_checkpointing is 'auto'"),
    (
        FSDP2,
        EXPERTS | {"n_layers": 2, "n_dense_layers": 1, "activation_checkpointing": "auto"},
        "n_dense_layers is 1 and activation_checkpointing is 'auto'",
    ),
    (FSDP2, {"n_kv_heads": 3}, "n_heads is 4 and n_kv_heads is 3"),
    (FSDP2, {"dim": 60}, "dim is 60 and n_heads is 4"),
    (FSDP2, {"qk_rope_head_dim": 2}, "kv_lora_rank is 0 and q_lora_rank is 0 and qk_rope_head_dim is 2"),
    (FSDP2, {"q_lora_rank": 8}, "kv_lora_rank is 0 and q_lora_rank is 8"),
    (FSDP2, {"kv_lora_rank": 8}, "kv_lora_rank is 8 and qk_rope_head_dim is 0"),
    (FSDP2, {"kv_lora_rank": 8, "qk_rope_head_dim": 3}, "kv_lora_rank is 8 and qk_rope_head_dim is 3"),
    (FSDP2, LATENT | FLOAT8, "kv_lora_rank is 16 and float8_linear is true"),
    (FSDP2, {"context_parallel_degree": 4, "seq_len": 12}, "context_parallel_degree is 4 and seq_len is 12"),
    (FSDP2, {"tensor_parallel_degree": 8}, "tensor_parallel_degree is 8 and n_heads is 4"),
    (FSDP2, {"tensor_parallel_degree": 4}, "tensor_parallel_degree is 4 and n_kv_heads is 2"),
    (FSDP2, {"tensor_parallel_degree": 2, "ffn_hidden": 191}, "tensor_parallel_degree is 2 and ffn_hidden is 191"),
    (FSDP2, {"tensor_parallel_degree": 2, "vocab_size": 257}, "tensor_parallel_degree is 2 and vocab_size is 257"),
    (FSDP2, EXPERTS | {"tensor_parallel_degree": 2, "moe_inter_dim": 31}, "degree is 2 and moe_inter_dim is 31"),
    (
        FSDP2,
        {"tensor_parallel_degree": 4, "n_kv_heads": 4, "context_parallel_degree": 2, "seq_len": 12},
        "context_parallel_degree is 2 and seq_len is 12",
    ),
    (FSDP2, {"async_tensor_parallel": True}, "async_tensor_parallel is true and tensor_parallel_degree is 1"),
    (FSDP2, ASYNC | {"compile_blocks": True}, "async_tensor_parallel is true and device is 'cpu'"),
    (FSDP2, ASYNC | ON_GPU, "async_tensor_parallel is true and compile_blocks is false"),
    (SIMPLE, ASYNC | ON_GPU, "async_tensor_parallel is true and backend is 'aot_eager'"),
    (
        FSDP2,
        ASYNC | ON_GPU | {"compile_blocks": True, "all_gather": "symmetric"},
        "async_tensor_parallel is true and all_gather is 'symmetric'",
    ),
    (FSDP2, EXPERTS | {"all_gather": "symmetric", "expert_parallel_degree": 2}, "degree is 2 and all_gather is"),
    (FSDP2, {"all_gather": "copy_engine"}, "all_gather is 'copy_engine' and device is 'cpu'"),
    (FSDP2, ZERO_BUBBLE | {"pipeline_parallel_degree": 1}, "'ZBVZeroBubble' and pipeline_parallel_degree is 1"),
    (FSDP2, PP | {"n_layers": 3}, "pipeline_parallel_degree is 4 and .* and n_layers is 3"),
    (FSDP2, INTERLEAVED | {"n_layers": 7}, "'Interleaved1F1B' and n_layers is 7"),
    (FSDP2, PP | {"gradient_accumulation": 3}, "pipeline_parallel_degree is 4 and gradient_accumulation is 3"),
    (FSDP2, INTERLEAVED | {"gradient_accumulation": 9}, "'Interleaved1F1B' and .* gradient_accumulation is 9"),
    (FSDP2, PP | {"fault": {"kind": "drop_gradient"}}, "pipeline_parallel_degree is 4 and fault is .*drop_gradient"),
    (FSDP2, PP | {"loss_chunks": 3}, "loss_chunks is 3 and pipeline_parallel_degree is 4"),
    (FSDP2, ZERO_BUBBLE | {"activation_checkpointing": "selective"}, "activation_checkpointing is 'selective'"),
    (FSDP2, ZERO_BUBBLE | {"reshard_after_forward": True}, "reshard_after_forward is true"),
    (FSDP2, ZERO_BUBBLE | {"reduce_every_micro_batch": True}, "reduce_every_micro_batch is true"),
    (FSDP2, ZERO_BUBBLE | {"compile_blocks": True}, "compile_blocks is true"),
    (SIMPLE, ZERO_BUBBLE, "pipeline_parallel_schedule is 'ZBVZeroBubble': autograd"),
    (FSDP2, {"expert_parallel_degree": 2}, "expert_parallel_degree is 2 and num_experts is 0"),
    (FSDP2, {"shared_experts": 1}, "num_experts is 0 and shared_experts is 1 and .*: there are no experts for"),
    (FSDP2, {"num_experts": 1}, "top_k is 2 and num_experts is 1"),
    (FSDP2, {"num_experts": 6, "expert_parallel_degree": 4}, "num_experts is 6 and expert_parallel_degree is 4"),
    (FSDP2, EXPERTS | FLOAT8, "num_experts is 4 and float8_linear is true"),
    (FSDP2, EXPERTS | {"moe_force_load_balance": True, "load_balance_coeff": 0.1}, "and load_balance_coeff is 0.1"),
    (FSDP2, EXPERTS | {"n_dense_layers": 2}, "n_dense_layers is 2 and n_layers is 2"),
    (FSDP2, EXPERTS | {"param_dtype": "bfloat16", "ffn_hidden": 100}, "param_dtype is 'bfloat16' .* ffn_hidden is 100"),
    (FSDP2, EXPERTS | {"moe_inter_dim": 30}, "param_dtype is 'float32' .* moe_inter_dim is 30"),
    (FSDP2, EXPERTS | {"param_dtype": "bfloat16", "dim": 72, "n_heads": 4, "moe_inter_dim": 36}, "moe_inter_dim is 36"),
    (FSDP2, {"float8_recipe": "rowwise"}, "float8_recipe is 'rowwise' and float8_linear is false"),
    (FSDP2, {"float8_output": True}, "float8_output is true and float8_linear is false and loss_chunks is 0"),
    (FSDP2, FLOAT8 | {"float8_output": True, "loss_chunks": 2}, "float8_linear is true and loss_chunks is 2"),
    (FSDP2, FLOAT8 | {"float8_output": True, "vocab_size": 24}, "float8_output is true and vocab_size is 24"),
    (FSDP2, FLOAT8 | {"tensor_parallel_degree": 2}, "float8_linear is true and tensor_parallel_degree is 2"),
    (FSDP2, FLOAT8 | {"ffn_hidden": 200}, "float8_linear is true and .* ffn_hidden is 200"),
    (FSDP2, FLOAT8 | {"batch_size": 1, "context_parallel_degree": 4}, "float8_linear is true and .*degree is 4"),
    (FSDP2, {"fill_uninitialized_memory": True}, "fill_uninitialized_memory is true and deterministic is false"),
    (FSDP2, {"hash_operators_step": 11}, "hash_operators_step is 11 and steps is 10"),
    (FSDP2, {"hash_tensors_step": 2}, r"hash_tensors_step is 2 and hash_tensors is \[\]"),
    (FSDP2, {"hash_tensors": ["weights"], "hash_tensors_step": 11}, "hash_tensors_step is 11 and steps is 10"),
    (FSDP2, {"save_checkpoint": "here"}, "save_checkpoint is 'here': ranks may run in any folder"),
    (FSDP2, {"load_checkpoint": "here"}, "load_checkpoint is 'here': ranks may run in any folder"),
    (FSDP2, {"save_checkpoint": "/proc"}, "save_checkpoint is '/proc': it exists already"),
    (FSDP2, {"load_checkpoint": "/proc"}, "load_checkpoint is '/proc': it holds no complete checkpoint"),
    (SIMPLE, {"dump_graphs": "graphs"}, "dump_graphs is 'graphs': ranks may run in any folder"),
    (SIMPLE, EAGER | {"bucketing": "auto"}, "backend is 'eager' and bucketing is 'auto'"),
    (SIMPLE, EAGER | {"reshard_after_forward": True}, "backend is 'eager' and .* reshard_after_forward is true"),
    (SIMPLE, {"bucketing": "manual"}, r"bucketing is 'manual' and bucket_modules is \[\]"),
    (SIMPLE, {"bucket_modules": ["norm"]}, r'bucketing is \'transformer_block\' and bucket_modules is \["norm"\]'),
    (SIMPLE, {"bucketing": "auto", "bucket_order": "registration"}, "bucketing is 'auto' and bucket_order is 'reg"),
    (SIMPLE, {"bucketing": "none", "blocks_per_bucket": 2}, "blocks_per_bucket is 2 and bucketing is 'none'"),
    (SIMPLE, {"context_parallel_degree": 2, "bucketing": "none", "overlap_reorder": True}, "2 and bucketing is 'none'"),
    (SIMPLE, {"context_parallel_degree": 2, "bucketing": "auto"}, "degree is 2 and bucketing is 'auto'"),
    *[
        (SIMPLE, {"overlap_reorder_modules": ["norm"]} | given, r'overlap_reorder_modules is \["norm"\] and')
        for given in ({"overlap_reorder": False}, {"bucketing": "none"}, {"bucketing": "auto"})
    ],
    (SIMPLE, EAGER | STEP, "trace is 'step' and backend is 'eager'"),
    (SIMPLE, {"cuda_graphs": True}, "cuda_graphs is true and trace is 'model'"),
    (SIMPLE, CAPTURED | {"backend": "inductor"}, "trace is 'step' and backend is 'inductor'"),
    (SIMPLE, CAPTURED, "cuda_graphs is true and device is 'cpu'"),
    (SIMPLE, CAPTURED | ON_GPU | {"ranks": 2}, "device is 'cuda' and ranks is 2"),
    (SIMPLE, STEP | PP | {"pipeline_parallel_degree": 2}, "trace is 'step' and pipeline_parallel_degree is 2"),
    (SIMPLE, STEP | {"compile_loss": True}, "trace is 'step' and compile_loss is true"),
    (SIMPLE, STEP | {"hash_operators_step": 1}, "trace is 'step' and hash_operators_step is 1"),
    (SIMPLE, STEP | {"fault": {"kind": "drop_gradient"}}, "trace is 'step' and fault is .*drop_gradient"),
    (SIMPLE, CAPTURED | ON_GPU | {"gradient_accumulation": 2}, "cuda_graphs is true and gradient_accumulation is 2"),
    (SIMPLE, CAPTURED | ON_GPU | EXPERTS, "cuda_graphs is true and num_experts is 4"),
    (SIMPLE, CAPTURED | ON_GPU | {"fault": {"kind": "operator_input", "operator": "x"}}, "true and fault is .*input"),
]


@pytest.mark.parametrize(("workload", "keys", "message"), REFUSED)
def test_keys_that_contradict_each_other_are_refused_with_their_values(workload, keys, message):
    with pytest.raises(ValueError, match=message):
        check(workload, **keys)
