"""Latent attention against the formulas of its paper, head by head, and the DeepSeek shape of the Llama workloads."""

import math

import pytest
import torch
import torch.nn.functional as F
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.models import build_model
from aorta_workloads.models.common.feed_forward import FeedForward
from aorta_workloads.models.common.moe import MoeFeedForward
from aorta_workloads.models.common.rope import apply_rope, precompute_freqs_cis
from aorta_workloads.models.config import LatentConfig, ModelConfig
from aorta_workloads.models.deepseek_v3.model import LatentAttention

from tests.rank.settings import make_settings

DIM, HEADS, HEAD_DIM, SEQ_LEN = 24, 3, 8, 7


def make_attention(q_lora_rank, kernel="flash"):
    latent = LatentConfig(kv_lora_rank=10, q_lora_rank=q_lora_rank, qk_rope_head_dim=4)
    config = ModelConfig(DIM, 1, HEADS, HEADS, 1, 1, 10000.0, 1e-6, kernel, latent=latent)
    attention = LatentAttention(config)
    random = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=random)
    return attention


def head_by_head(attention, x, freqs_cis):
    """Evaluate the paper's formulas for one sequence, one head and one query at a time."""
    latent = attention.latent
    queries, wq = (attention.q_norm(attention.wq_a(x)), attention.wq_b) if latent.q_lora_rank else (x, attention.wq)
    shared = apply_rope((x @ attention.wkv_a.weight[latent.kv_lora_rank :].T)[:, None], freqs_cis)[:, 0]
    compressed = F.rms_norm(
        x @ attention.wkv_a.weight[: latent.kv_lora_rank].T,
        (latent.kv_lora_rank,),
        attention.kv_norm.weight,
        1e-6,
    )
    width = HEAD_DIM + latent.qk_rope_head_dim
    outputs = []
    for head in range(HEADS):
        q = queries @ wq.weight[head * width : (head + 1) * width].T
        k, v = (compressed @ attention.wkv_b.weight[head * 2 * HEAD_DIM :][: 2 * HEAD_DIM].T).chunk(2, dim=-1)
        turned = apply_rope(q[:, None, HEAD_DIM:], freqs_cis)[:, 0]
        rows = []
        for position in range(len(x)):
            scores = k[: position + 1] @ q[position, :HEAD_DIM] + shared[: position + 1] @ turned[position]
            rows.append(torch.softmax(scores / math.sqrt(width), dim=0) @ v[: position + 1])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=-1) @ attention.wo.weight.T


@pytest.mark.parametrize("kernel", ["flash", "math", "flex"])
@pytest.mark.parametrize("q_lora_rank", [0, 6])
def test_attention_and_its_gradients_are_those_of_the_formulas(q_lora_rank, kernel):
    attention = make_attention(q_lora_rank, kernel)
    x = torch.randn(2, SEQ_LEN, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    freqs_cis = precompute_freqs_cis(torch.arange(SEQ_LEN), 4, 10000.0)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    out = attention(x, freqs_cis)
    expected = torch.stack([head_by_head(attention, sequence, freqs_cis) for sequence in x])

    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    wanted = [x, *attention.parameters()]
    found, known = (torch.autograd.grad(result, wanted, direction) for result in (out, expected))
    torch.testing.assert_close(found, known, rtol=1e-3, atol=1e-4)


def model_of(size, **changes):
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", size=size, **changes)
    with torch.device("meta"):
        return build_model(settings.with_kernels("math").model)


def test_preset_has_the_parameters_of_deepseek_v2_lite():
    # 15.7 billion are published.
    assert sum(parameter.numel() for parameter in model_of("deepseek_16b").parameters()) == 15_706_484_224


def test_first_blocks_are_dense_and_the_others_have_shared_experts():
    dense, *others = model_of("deepseek_debug").layers
    assert type(dense.feed_forward) is FeedForward
    assert dense.feed_forward.w1.out_features == 192
    for block in others:
        assert isinstance(block.feed_forward, MoeFeedForward)
        assert block.feed_forward.experts.w1.shape == (8, 64, 64)
        assert block.feed_forward.shared_experts.w1.out_features == 2 * 64
