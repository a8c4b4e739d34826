"""Operations of training on a token, and the throughput that results report; test_simple_fsdp.py counts operators."""

from dataclasses import replace

import pytest
import torch
from aorta_workloads.models import build_model
from aorta_workloads.models.config import ModelConfig
from aorta_workloads.models.flops import flops_per_token, peak_flops, throughput_metrics

from tests.unit.builders import each_of

SEQ_LEN = 32
PLAIN = ModelConfig(64, 2, 4, 2, 192, 256, 500000.0, 1e-5)
ATTENTION = 12 * PLAIN.n_layers * PLAIN.dim * SEQ_LEN
EXPERT = 3 * PLAIN.dim * PLAIN.ffn_hidden


def num_multiplied(config):
    """Return the number of parameters that a token is multiplied by if all experts were."""
    with torch.device("meta"):
        model = build_model(config)
    return sum(
        weight.numel() for name, weight in model.named_parameters() if "tok_emb" not in name and "norm" not in name
    )


MODELS = {
    "plain": (PLAIN, 0),
    "checkpointed": (replace(PLAIN, attention="flex", rotary="complex"), 0),
    "two of four experts": (replace(PLAIN, num_experts=4), PLAIN.n_layers * 2 * EXPERT),
}


@each_of("config, num_unused", MODELS)
def test_a_token_needs_six_operations_per_parameter_and_those_of_attention(config, num_unused):
    # PaLM, arXiv 2204.02311, appendix B.
    assert flops_per_token(config, SEQ_LEN) == 6 * (num_multiplied(config) - num_unused) + ATTENTION


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name, peak):
    assert peak_flops(name) == peak


@pytest.mark.parametrize(("dtype", "has_mfu"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_utilization_is_reported_where_the_peak_is_known(monkeypatch, dtype, has_mfu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    metrics = throughput_metrics(PLAIN, SEQ_LEN, dtype, 1e8, torch.device("cuda"))
    assert metrics["model_tflops"] == pytest.approx(flops_per_token(PLAIN, SEQ_LEN) / 1e4)
    assert throughput_metrics(PLAIN, SEQ_LEN, dtype, 1e8, torch.device("cpu")) == {}
    assert metrics.get("mfu") == (pytest.approx(metrics["model_tflops"] / 989) if has_mfu else None)
