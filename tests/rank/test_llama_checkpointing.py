"""The operators whose outputs activation checkpointing keeps; test_llama_model.py counts what it recomputes."""

from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.distributed.activation_checkpoint import EverySecondMatmul, keep_every_matmul
from torch.utils.checkpoint import CheckpointPolicy

from tests.unit.builders import each_of

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
KEPT, RECOMPUTED = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
FORWARD = SimpleNamespace(is_recompute=False)


POLICIES = {
    "exchange of tokens": (collectives.all_to_all_single.default, {}, KEPT),
    "reduction of activations": (collectives.reduce_scatter_tensor.default, {}, KEPT),
    # Parameters are gathered within blocks too.
    "gather": (collectives.all_gather_into_tensor.default, {}, RECOMPUTED),
    "copy to the host": (aten._to_copy.default, {"device": torch.device("cpu")}, KEPT),
    "cast": (aten._to_copy.default, {"dtype": torch.bfloat16}, RECOMPUTED),
}


@each_of("op, options, policy", POLICIES)
@each_of("policy_of", {"elementwise": keep_every_matmul, "selective": EverySecondMatmul()})
def test_exchanges_and_copies_to_the_host_are_kept(policy_of, op, options, policy):
    assert policy_of(FORWARD, op, **options) == policy


@pytest.mark.parametrize("op", [aten.mm.default, aten._scaled_mm.default, torch.ops.aorta.grouped_mm.default], ids=str)
def test_elementwise_keeps_every_matrix_product_and_selective_every_second(op):
    assert [keep_every_matmul(FORWARD, op) for _ in range(2)] == [KEPT, KEPT]
    selective = EverySecondMatmul()
    assert [selective(FORWARD, op) for _ in range(3)] == [KEPT, RECOMPUTED, KEPT]
