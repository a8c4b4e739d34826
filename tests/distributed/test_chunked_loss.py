"""The loss in chunks on CPU ranks: the bits of both implementations, and the loss of whole logits."""

import pytest

from tests.distributed import TWO_CPU_RANKS

pytestmark = [
    pytest.mark.numerics,
    TWO_CPU_RANKS,
    pytest.mark.launch_timeout(180),
    pytest.mark.extended,
]

TRAINING = {"size": "debug", "n_layers": 1, "n_kv_heads": 4, "param_dtype": "bfloat16", "loss_chunks": 3}
LAYOUTS = {
    "plain": {},
    "float32, micro-batches": {
        "param_dtype": "float32",
        "gradient_accumulation": 2,
        "max_grad_norm": None,
        "activation_checkpointing": "selective",
    },
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "fused": {"compile_loss": True},
}
# Eager FSDP2 then reduces each micro-batch, as llama_simple_fsdp does.
EAGER = {"workload": "llama_fsdp2", "reduce_every_micro_batch": True}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_aot_eager_has_every_bit_of_fsdp2(workload, layout):
    training = TRAINING | LAYOUTS[layout]
    traced = {"workload": "llama_simple_fsdp"} | ({"bucketing": "transformer_block"} if layout == "plain" else {})
    workload.compare(traced | training, EAGER | training, steps=5)


def test_chunks_train_as_whole_logits(workload):
    training = TRAINING | {"steps": 5, "warmup": 0, "hash_every": 1, "param_dtype": "float32"}
    whole = workload.run("llama_fsdp2", **training | {"loss_chunks": 0})
    for layout in ("plain", "tp"):
        options = LAYOUTS[layout] | ({"batch_size": 4} if layout == "tp" else {})
        chunked = workload.run("llama_fsdp2", **training | options)
        assert chunked.loss == pytest.approx(whole.loss, rel=1e-5), layout
        assert chunked.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4), layout
