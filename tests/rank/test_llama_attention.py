"""Kernels of attention on CPU, and the choice between them; CUDA's are in tests/distributed/test_attention_gpu.py."""

from dataclasses import replace

import pytest
import torch
from aorta_workloads.distributed.activation_checkpoint import checkpoint_blocks
from aorta_workloads.models import build_model
from aorta_workloads.models.common import attention, flex
from aorta_workloads.models.common.attention import KERNELS, SDPA, AttentionInputs, choose_kernel
from aorta_workloads.models.common.data import initialize, sequences
from aorta_workloads.models.common.flex import causal_blocks, flex_attention, flex_attention_backward
from aorta_workloads.models.config import ModelConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.builders import each_of

ON_CPU = ["flash", "math", "flex"]
# Pairs of queries and keys: square, and two chunks of context parallelism.
LENGTHS = [(32, 32), (8, 24), (200, 200)]
INPUTS = AttentionInputs(2, 4, 2, 32, (32,), 16, torch.float32, torch.device("cpu"))


def heads(num_heads, length, generator):
    """Return a projection's heads, which are not contiguous."""
    return torch.randn(2, length, num_heads, 16, generator=generator).transpose(1, 2).requires_grad_()


def tensors(num_queries, num_keys):
    generator = torch.Generator().manual_seed(0)
    return heads(4, num_queries, generator), heads(2, num_keys, generator), heads(2, num_keys, generator)


def attend_by_formula(q, k, v):
    """Return softmax(q k^T / sqrt(d)) v in float64; the last query attends to all keys."""
    k, v = (tensor.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q.double() @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[-2] - q.shape[-2] + 1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_every_kernel_computes_causal_attention_and_its_gradients(kernel, num_queries, num_keys):
    inputs = tensors(num_queries, num_keys)
    attend = SDPA(kernel)
    out, expected = attend(*inputs, attend.mask(num_queries, num_keys)), attend_by_formula(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    pairs = zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad.double()), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("hip", "mode", "device", "unfused"),
    [
        (None, True, "cuda", False),
        ("6.4", False, "cuda", False),
        ("6.4", True, "cuda", True),
        (None, False, "cpu", True),
    ],
    indirect=["hip"],
)
def test_flex_attention_runs_unfused_where_compiled_kernels_do_not_repeat_their_bits(
    deterministic, hip, mode, device, unfused
):
    deterministic(mode)
    assert flex.is_unfused(torch.device(device)) is unfused


@each_of("length", {"whole": slice(None), "with gaps": slice(8, 24)})
def test_flex_announces_the_shapes_and_strides_that_it_returns(length):
    q, k, v = (tensor.detach()[:, :, length] for tensor in tensors(32, 32))
    out, logsumexp = flex_attention(q, k, v)
    real = [out, logsumexp, *flex_attention_backward(out, q, k, v, out, logsumexp)]

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(tensor) for tensor in (q, k, v))
        out, logsumexp = flex_attention(q, k, v)
        fake = [out, logsumexp, *flex_attention_backward(out, q, k, v, out, logsumexp)]
    described = [[(x.shape, x.stride(), x.dtype) for x in results] for results in (real, fake)]
    assert described[0] == described[1]


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_graphs_that_are_compiled_for_cuda_compute_what_cpu_kernels_do(num_queries, num_keys, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _: graph)
    q, k, v = (tensor.detach().contiguous() for tensor in tensors(num_queries, num_keys))

    out, logsumexp = flex.run_fused(flex.fused_forward, (q, k, v), q, k)
    torch.testing.assert_close((out, logsumexp), flex_attention(q, k, v))
    given = (torch.ones_like(out), q, k, v, out, logsumexp)
    torch.testing.assert_close(tuple(flex.run_fused(flex.fused_backward, given, q, k)), flex_attention_backward(*given))


@settings(max_examples=40, deadline=None)
@given(num_queries=st.integers(1, 700), num_more_keys=st.integers(0, 700))
def test_sparse_mask_is_that_of_torch(num_queries, num_more_keys):
    num_keys = num_queries + num_more_keys
    made = causal_blocks(num_queries, num_keys, torch.device("cpu"))
    known = create_block_mask(made.mask_mod, None, None, num_queries, num_keys, device="cpu")

    assert made.shape == known.shape
    assert made.BLOCK_SIZE == known.BLOCK_SIZE
    for counts, columns in [
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ]:
        assert torch.equal(getattr(made, counts), getattr(known, counts)), counts
        assert torch.equal(getattr(made, columns), getattr(known, columns)), columns
        assert getattr(made, counts).is_contiguous()
        assert getattr(made, columns).is_contiguous()
    hidden = made.mask_mod(0, 0, torch.arange(num_queries).unsqueeze(1), torch.arange(num_keys)).logical_not()
    assert torch.equal(hidden, torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_more_keys + 1))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_flex_has_the_same_bits_in_a_traced_graph_and_under_checkpointing(checkpointing):
    plain, traced = (model(kind, attention="flex") for kind in ("none", checkpointing))
    traced.compile(backend="aot_eager", fullgraph=True)

    assert gradients(plain) == gradients(traced)


@pytest.mark.parametrize(("checkpointing", "num_calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_only_full_checkpointing_runs_flex_again(checkpointing, num_calls):
    with CallCounter() as counter:
        gradients(model(checkpointing, attention="flex"))
    assert counter.num_calls == num_calls


class CallCounter(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += func is torch.ops.aorta.flex_attention.default
        return func(*args, **(kwargs or {}))


def model(checkpointing="none", **changes):
    config = ModelConfig(64, 1, 4, 2, 192, 256, 500000.0, 1e-5, **changes)
    made = build_model(config)
    checkpoint_blocks(made, (checkpointing,) * config.n_layers)
    initialize(made, config.n_layers, seed=0)
    return made


def gradients(made):
    tokens = sequences(0, 0, range(2), 31, 256)
    made(tokens, made.config.freqs_cis(torch.arange(32))).square().mean().backward()
    return {name: parameter.grad.numpy().tobytes() for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_takes_the_flash_kernel_on_cpu(deterministic):
    assert choose_kernel("auto", INPUTS, deterministic=deterministic) == "flash"


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_kernel_that_runs_is_taken_as_asked(kernel):
    assert choose_kernel(kernel, INPUTS, deterministic=False) == kernel
    assert choose_kernel(kernel, replace(INPUTS, num_queries=8, num_keys=(16, 24)), deterministic=False) == kernel


@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - set(ON_CPU)))
def test_a_kernel_that_can_not_run_is_refused_with_those_that_can(kernel):
    message = rf"attention is '{kernel}', which can't run on cpu \(deterministic, torch.float32\): {kernel}: .+"
    with pytest.raises(ValueError, match=message + "Allowed here are auto, flash, math, flex$"):
        choose_kernel(kernel, INPUTS, deterministic=True)


ON_CUDA = AttentionInputs(1, 32, 8, 8192, (8192,), 128, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "deterministic", "kernel"),
    [
        ({}, False, "cudnn"),
        ({}, True, "cudnn"),
        # Its backward pass would store gradients of 16 GiB of scores.
        ({"num_queries": 16384, "num_keys": (16384,)}, True, "flex"),
        ({"num_queries": 16384, "num_keys": (16384,)}, False, "cudnn"),
        # Chunks of context parallelism
        ({"num_keys": (8192, 16384)}, True, "flex"),
        ({"num_keys": (8192, 16384)}, False, "flash"),
    ],
)
def test_auto_takes_the_fastest_kernel_on_cuda_that_fits(monkeypatch, changes, deterministic, kernel):
    monkeypatch.setattr(attention, "_refusal", lambda *_: None)
    assert choose_kernel("auto", replace(ON_CUDA, **changes), deterministic=deterministic) == kernel


class Operators(TorchDispatchMode):
    """Keeps what each operator is given after its tensors."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.given[func.overloadpacket] = args[3:]
        return func(*args, **kwargs or {})


def test_cudnn_of_a_deterministic_run_is_torchs_operator(deterministic):
    deterministic(True)
    q, k, v = (tensor.to("meta") for tensor in tensors(32, 32))
    with Operators() as operators:
        assert SDPA("cudnn")(q, k, v).shape == q.shape
    # No bias; the logarithms of the sums for the backward pass; no dropout; the causal mask.
    assert operators.given[torch.ops.aten._scaled_dot_product_cudnn_attention] == (None, True, 0.0, True)


class NoPlanError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "reason"), [(NoPlanError("no plan\nat 5"), "no plan"), (NoPlanError(), "NoPlanError")]
)
def test_any_error_of_a_kernel_refuses_it_with_its_first_line(monkeypatch, error, reason):
    def fail(*_):
        raise error

    monkeypatch.setattr(SDPA, "__call__", fail)
    with pytest.raises(ValueError, match=rf"flash: {reason}.*\. Allowed here are auto, math$"):
        choose_kernel("flash", INPUTS, deterministic=False)
