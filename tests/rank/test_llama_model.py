from dataclasses import replace

import pytest
import torch
from aorta_workloads.common import faults
from aorta_workloads.common.faults import Fault, LlamaFault, PlantedFault
from aorta_workloads.distributed.activation_checkpoint import checkpoint_blocks
from aorta_workloads.models import build_model
from aorta_workloads.models.common.data import initial_value, initialize, sequences
from aorta_workloads.models.common.rope import apply_rope, precompute_freqs_cis
from aorta_workloads.models.config import ModelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.builders import each_of

CPU = torch.device("cpu")
DEBUG = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_hidden": 192,
    "vocab_size": 256,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
}
LLAMA_3 = {"n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5}


def make_model(seed=0, **dimensions):
    config = ModelConfig(**DEBUG | dimensions)
    model = build_model(config)
    initialize(model, config.n_layers, seed)
    return model


def tokens(num_sequences=2, seq_len=8):
    return sequences(0, 0, range(num_sequences), seq_len - 1, DEBUG["vocab_size"])


def logits(model, tokens):
    return model(tokens, model.config.freqs_cis(torch.arange(tokens.shape[1])))


PARAMETER_COUNTS = {
    "8b": ({"dim": 4096, "n_layers": 32, "ffn_hidden": 14336}, 8_030_261_248),
    "1b": ({"dim": 2048, "n_layers": 16, "ffn_hidden": 8192}, 1_498_482_688),
}


@each_of("dimensions, expected", PARAMETER_COUNTS)
def test_llama_3_dimensions_have_llama_3_parameter_counts(dimensions, expected):
    with torch.device("meta"):
        model = build_model(ModelConfig(**LLAMA_3 | dimensions))

    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_no_logit_depends_on_later_tokens():
    model, first = make_model(), tokens()
    second = first.clone()
    second[:, 5:] = (second[:, 5:] + 1) % DEBUG["vocab_size"]

    before, after = logits(model, first), logits(model, second)

    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_rotated_products_depend_on_the_distance_of_positions_alone():
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    freqs_cis = precompute_freqs_cis(torch.arange(32), 16, 10000.0)

    def product(query_position, key_position):
        turned = [
            apply_rope(x, freqs_cis[:, position : position + 1])
            for x, position in ((query, query_position), (key, key_position))
        ]
        return torch.sum(turned[0] * turned[1])

    torch.testing.assert_close(product(3, 1), product(30, 28))
    assert (product(3, 1) - product(3, 2)).abs() > 1e-3


def test_rotation_keeps_lengths_and_leaves_position_0():
    x = torch.randn(2, 9, 4, 16)
    turned = apply_rope(x, precompute_freqs_cis(torch.arange(9), 16, 500000.0))

    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_numbers_rotate_with_every_bit_of_real_ones(dtype):
    x = torch.randn(2, 9, 4, 16).to(dtype).requires_grad_()
    config = ModelConfig(**DEBUG)
    real, whole = (replace(config, rotary=form).freqs_cis(torch.arange(9)) for form in ("real", "complex"))
    gradient = torch.randn(2, 9, 4, 16).to(dtype)

    turned = [apply_rope(x, freqs_cis) for freqs_cis in (real, whole)]
    gradients = [torch.autograd.grad(one, x, gradient)[0] for one in turned]

    assert whole.is_complex()
    assert torch.equal(*turned)
    assert torch.equal(*gradients)


def test_rotated_queries_have_the_memory_order_of_projected_ones():
    turned = apply_rope(torch.randn(2, 9, 4, 16), precompute_freqs_cis(torch.arange(9), 16, 500000.0))

    assert turned.is_contiguous()


def test_shared_key_and_value_heads_equal_repeated_ones():
    shared, repeated = make_model(), make_model(n_kv_heads=DEBUG["n_heads"])
    state = shared.state_dict()
    head_dim = DEBUG["dim"] // DEBUG["n_heads"]
    for name in [name for name in state if name.endswith(("wk.weight", "wv.weight"))]:
        heads = state[name].unflatten(0, (-1, head_dim))
        state[name] = heads.repeat_interleave(DEBUG["n_heads"] // DEBUG["n_kv_heads"], dim=0).flatten(0, 1)
    repeated.load_state_dict(state)

    torch.testing.assert_close(logits(shared, tokens()), logits(repeated, tokens()))


@pytest.mark.parametrize(("kind", "num_recomputed"), [("none", 0), ("elementwise", 0), ("selective", 3), ("full", 6)])
def test_checkpointed_blocks_have_the_same_gradients_and_recompute_their_share(kind, num_recomputed):
    kept, recomputed = make_model(), make_model()
    checkpoint_blocks(recomputed, (kind,) * len(recomputed.layers))
    logits(kept, tokens()).square().mean().backward()
    loss = logits(recomputed, tokens()).square().mean()
    with MatmulCounter() as counter:
        loss.backward()

    pairs = zip(kept.parameters(), recomputed.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    # Nothing in backward needs the output of a block's last product, so it is not recomputed.
    num_linear = 7 * DEBUG["n_layers"] + 1
    assert counter.num_calls == 2 * num_linear + num_recomputed * DEBUG["n_layers"]


class MatmulCounter(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    first, again, other = (make_model(seed).state_dict() for seed in (0, 0, 1))

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == name.endswith("norm.weight") for name in first)


def test_a_weight_depends_on_its_name_and_not_on_what_was_made_before():
    model = make_model()
    name, last = list(model.named_parameters())[-1]

    assert torch.equal(last, initial_value(name, last, DEBUG["n_layers"], seed=0))
    assert not torch.equal(last, initial_value("another", last, DEBUG["n_layers"], seed=0))


def test_a_global_batch_is_the_same_however_ranks_share_it():
    whole = sequences(5, 3, range(8), 16, 256)
    parts = [sequences(5, 3, range(first, first + 2), 16, 256) for first in range(0, 8, 2)]

    assert torch.equal(whole, torch.cat(parts))
    assert len({tuple(row) for row in whole.tolist()}) == 8
    assert not torch.equal(whole, sequences(5, 4, range(8), 16, 256))


@pytest.mark.parametrize("kind", ["weight_ulp", "double_moment"])
def test_fault_changes_one_element_of_one_tensor_on_its_rank_after_its_step_alone(kind):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.tok_embeddings.weight.grad = torch.ones_like(model.tok_embeddings.weight)
    optimizer.step()

    def values():
        state = [moments["exp_avg"].clone() for moments in optimizer.state.values()]
        return [value.clone() for value in model.state_dict().values()] if kind == "weight_ulp" else state

    def run_step(step, rank):
        with PlantedFault(Fault(kind=kind, step=2, rank=1), rank, CPU).in_step(step, model, optimizer):
            pass

    before = values()
    for step, rank in [(1, 1), (2, 0), (3, 1)]:
        run_step(step, rank)
    assert all(map(torch.equal, before, values()))

    run_step(2, 1)
    assert sum((old != new).sum().item() for old, new in zip(before, values(), strict=True)) == 1


def test_dropped_gradients_and_late_batches_strike_their_rank_and_steps_alone(monkeypatch):
    model = make_model()
    optimizer, late = torch.optim.AdamW(model.parameters()), []
    monkeypatch.setattr(faults, "Delay", lambda _, delay_ms: lambda: late.append(delay_ms))

    def gradients_of(kind, rank):
        fault = PlantedFault(LlamaFault(kind=kind, step=2, rank=1, delay_ms=5.0, every=2), rank, CPU)
        forward, batches = fault.around(lambda x: 2 * x), fault.batches(iter(range(9)))
        weight = torch.ones((), requires_grad=True)
        next(batches)
        for step in range(1, 5):
            with fault.in_step(step, model, optimizer):
                next(batches)
                forward(weight).backward()
            yield float(weight.grad)
            weight.grad = None
        next(batches)

    assert [[*gradients_of("drop_gradient", rank)] for rank in (0, 1)] == [[2, 2, 2, 2], [2, 0, 2, 2]]
    assert [[*gradients_of("slowdown", rank)] for rank in (0, 1)] == [[2] * 4] * 2
    assert late == [5.0] * 2


@pytest.mark.parametrize(("field", "value"), [("step", 4), ("rank", 2)])
def test_a_fault_that_could_not_happen_is_an_error(field, value):
    with pytest.raises(ValueError, match=f"{field} {value}"):
        Fault(kind="weight_ulp", **{field: value}).check(steps=3, world_size=2)
