"""Floating-point operations of operators and of training, and how many a device can do in a second.

Importing this module completes ``torch.utils.flop_counter.flop_registry`` with the operators of the model that torch
does not count. A multiplication and an addition are two operations, and attention counts as if no key were hidden.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from . import build_model
from .config import ModelConfig

aten, aorta = torch.ops.aten, torch.ops.aorta
# Operations of dense bfloat16 products in a second, by a part of the device's name, the longer name first: the
# vendors' data sheets. A device that is not listed has no MFU.
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI355X": 2500e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}
# Products of both take the same time; those of float32 depend on the switch for TF32.
_DTYPES = (torch.bfloat16, torch.float16)


def throughput_metrics(
    config: ModelConfig, seq_len: int, dtype: torch.dtype, tokens_per_s: float, device: torch.device
) -> dict[str, float]:
    """Return ``model_tflops`` and ``mfu`` of a rank that trains on so many tokens in a second; empty on CPU.

    The model flops utilization (PaLM, arXiv 2204.02311, appendix B) is missing where the peak of ``device`` in
    ``dtype`` is not known.
    """
    if device.type == "cpu":
        return {}
    model_flops = flops_per_token(config, seq_len) * tokens_per_s
    metrics = {"model_tflops": model_flops / 1e12}
    peak = peak_flops(torch.get_device_module(device).get_device_name(device)) if dtype in _DTYPES else None
    return metrics if peak is None else metrics | {"mfu": model_flops / peak}


def peak_flops(device_name: str) -> float | None:
    """Return the device's operations in a second, for dense products of bfloat16; None if they are not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Count the operations that training on a token of a sequence needs, without any that checkpointing repeats."""
    with torch.device("meta"):
        # All kernels of attention do the same work; this one has operators that run without a device.
        model = build_model(replace(config, attention="math"))
        tokens, freqs_cis = torch.zeros(1, seq_len, dtype=torch.int64), config.freqs_cis(torch.arange(seq_len))
    with FlopCounterMode(display=False) as counter:
        model(tokens, freqs_cis).sum().backward()
    total: int = counter.get_total_flops()
    return total / seq_len


def _of_grouped_products(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    # Two matrices are divided into groups along the same rows or columns; else a stack has a matrix for each group.
    return 2 * prod(left[-2:] if len(right) == 2 else left) * right[-1]


def _of_chunked_loss(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    # Logits and both gradients are a product each.
    return 6 * prod(x) * weight[0]


def _of_attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _of_attention_backward(_: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *__: Any, **___: Any) -> int:
    # Backward computes the scores again.
    return 2 * prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


# Up to torch 2.12, its formulas of these kernels fail where query heads share key heads; goes with torch 2.12.
_KERNELS = ("_flash_attention", "_efficient_attention", "_cudnn_attention", "_flash_attention_for_cpu")
_FORMULAS = {
    _of_grouped_products: (aten._grouped_mm, aorta.grouped_mm),
    _of_chunked_loss: (aorta.linear_cross_entropy,),
    _of_attention: (aorta.flex_attention, *(getattr(aten, f"_scaled_dot_product{kernel}") for kernel in _KERNELS)),
    _of_attention_backward: (
        aorta.flex_attention_backward,
        *(getattr(aten, f"_scaled_dot_product{kernel}_backward") for kernel in _KERNELS),
    ),
}
for _formula, _operators in _FORMULAS.items():
    for _operator in _operators:
        flop_registry.pop(_operator, None)
        register_flop_formula(_operator)(_formula)
