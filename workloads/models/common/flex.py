"""FlexAttention (arXiv 2412.05496) as one operator with a gradient, ``aorta::flex_attention``.

Torch's own function becomes a part of the graph around it, and a graph that does not reach inductor would evaluate the
function unfused, with different bits. This operator runs the same compiled kernels in an eager model, in every graph
and under activation checkpointing. On CUDA its backward kernel uses no atomics, so it is deterministic.

On CUDA each pass is compiled once per shape. Torch has no backward kernel for CPUs, and its compiled kernels for HIP do
not repeat their bits. CPU ranks, and deterministic runs on HIP, evaluate the same formulas unfused, with all scores in
memory.

The operators of torch are private (``common/torch_private.py``). Written for torch 2.11 to 2.13.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from ...common.torch_private import FakeTensorMode, create_fw_bw_graph, flex_backward, flex_forward, inductor

Results = tuple[torch.Tensor, ...]
# Torch's names for ``kernel_options``. A causal mask leaves no row empty, and the blocks of a row are neighbors.
KERNEL_OPTIONS: dict[str, int | bool] = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
# What torch's function passes to its kernels by default. For short sequences torch would choose another kernel, which
# ignores block sizes.
_DEFAULTS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "FORCE_USE_FLEX_ATTENTION": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
# Of the kernels on CUDA.
MIN_HEAD_DIM = 16
_BLOCK = 128


@torch.library.custom_op("aorta::flex_attention", mutates_args=())
def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally, the last query to all keys; return the output and each row's logsumexp to base 2.

    Tensors are ``[batch, heads, seq_len, head_dim]``; ``k`` and ``v`` may have fewer heads. The logsumexp is float32
    ``[batch, heads, seq_len]``. Results are contiguous.
    """
    if is_unfused(q.device):
        return _evaluate(q, k, v)
    out, logsumexp = run_fused(fused_forward, (q, k, v), q, k)
    return out, logsumexp


def is_unfused(device: torch.device) -> bool:
    """Return whether compiled kernels are missing on ``device``, or do not repeat their bits there."""
    on_hip = torch.version.hip is not None and torch.are_deterministic_algorithms_enabled()
    return device.type == "cpu" or on_hip


def _evaluate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores, (_, v) = _scores(q, k), _for_each_query_head(q, k, v)
    logsumexp = scores.logsumexp(-1)
    out = (scores - logsumexp.unsqueeze(-1)).exp().type_as(v) @ v
    return out, logsumexp / math.log(2)


@flex_attention.register_fake
def _(q: torch.Tensor, *_: torch.Tensor) -> Results:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("aorta::flex_attention_backward", mutates_args=())
def flex_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, contiguous, from ``grad``, the gradient of ``out``."""
    if is_unfused(q.device):
        return _differentiate(grad, q, k, v, out, logsumexp)
    grad_q, grad_k, grad_v = run_fused(fused_backward, (grad, q, k, v, out, logsumexp), q, k)
    return grad_q, grad_k, grad_v


def _differentiate(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, q, k, v, out, logsumexp = given
    whole_k, whole_v = _for_each_query_head(q, k, v)
    attended = (_scores(q, k) - math.log(2) * logsumexp.unsqueeze(-1)).exp()
    grad_attended = (grad @ whole_v.transpose(-2, -1)).float()
    row_sums = (grad.float() * out.float()).sum(-1, keepdim=True)
    grad_scores = (_scale(q) * attended * (grad_attended - row_sums)).type_as(q)
    whole = grad_scores.transpose(-2, -1) @ q, attended.type_as(grad).transpose(-2, -1) @ grad
    # Query heads that share a key head are neighbors.
    grad_k, grad_v = (part.unflatten(1, (k.shape[1], -1)).sum(2) for part in whole)
    return grad_scores @ whole_k, grad_k, grad_v


@flex_attention_backward.register_fake
def _(_: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: torch.Tensor) -> Results:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: Results, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Results:
    gradients: Results = flex_attention_backward(grad, *ctx.saved_tensors)
    return gradients


flex_attention.register_autograd(_gradients, setup_context=_remember)


def _scale(q: torch.Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the scaled scores of all pairs in float32, -inf where a key is hidden from a query."""
    (whole_k,) = _for_each_query_head(q, k)
    scores = _scale(q) * (q.float() @ whole_k.float().transpose(-2, -1))
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(k.shape[-2] - q.shape[-2] + 1)
    return scores.masked_fill(hidden, -math.inf)


def _for_each_query_head(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in tensors]


def fused_forward(mask: tuple[Any, ...], options: dict[str, int | bool], *tensors: torch.Tensor) -> Results:
    """Return the output and each row's logsumexp, by torch's operator."""
    q, k, v = tensors
    results: Results = flex_forward(q, k, v, _unchanged, mask, _scale(q), options)
    return results[:2]


def fused_backward(mask: tuple[Any, ...], options: dict[str, int | bool], *tensors: torch.Tensor) -> Results:
    """Return the gradients of queries, keys and values, by torch's operator."""
    grad, q, k, v, out, logsumexp = tensors
    score, *indices = (q.new_zeros((), requires_grad=True), *(q.new_zeros((), dtype=torch.int) for _ in range(4)))
    with torch.enable_grad():
        graphs = create_fw_bw_graph(_unchanged, (score, *indices), ())  # type: ignore[arg-type]
    no_grad = torch.zeros_like(logsumexp)
    gradients = flex_backward(q, k, v, out, logsumexp, grad, no_grad, *graphs, mask, _scale(q), options)  # type: ignore[arg-type]
    return gradients[:3]


def _unchanged(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return score


def run_fused(function: Callable[..., Results], given: Results, q: torch.Tensor, k: torch.Tensor) -> Results:
    """Run ``function`` on ``given``, compiled for these lengths."""
    # Strides differ between eager models and graphs, and between chunks of a sequence.
    tensors = [tensor.detach().contiguous() for tensor in given]
    mask = causal_blocks(q.shape[-2], k.shape[-2], q.device)
    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    compiled = _compiled(function, mask, shapes, tuple(sorted((_DEFAULTS | KERNEL_OPTIONS).items())))
    with torch.no_grad():
        return compiled(*_tensors_of(mask), *tensors)


@cache
def causal_blocks(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Return torch's sparse form of the causal mask in which the last query attends to all keys.

    ``create_block_mask`` would compare all pairs, and can't run within a dispatch mode.
    """
    offset = num_keys - num_queries
    first_row, first_key = (torch.arange(0, length, _BLOCK, device=device) for length in (num_queries, num_keys))
    end_row, end_key = first_row + _BLOCK, first_key + _BLOCK
    last_row = end_row.clamp(max=num_queries) - 1
    # Torch counts a block that exceeds the sequence as partly hidden.
    is_whole = (end_row <= num_queries).unsqueeze(1) & (end_key <= num_keys)
    is_full = is_whole & ((end_key - 1) <= (first_row + offset).unsqueeze(1))
    is_partial = (first_key <= (last_row + offset).unsqueeze(1)) & ~is_full

    def visible(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + offset >= key

    return BlockMask(
        (num_queries, num_keys),
        *_in_order(is_partial),
        *_in_order(is_full),
        *_in_order(is_partial.T),
        *_in_order(is_full.T),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=visible,
    )


def _in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of set elements of each row, and the columns, with columns of set elements first."""
    # Kernels read contiguous memory, whatever the strides are.
    blocks = blocks.int().contiguous()
    columns = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], columns.int()[None, None]


def _tensors_of(mask: BlockMask) -> list[torch.Tensor]:
    return [leaf for leaf in mask.as_tuple() if isinstance(leaf, torch.Tensor)]


@cache
def _compiled(
    function: Callable[..., Results],
    mask: BlockMask,
    shapes: tuple[tuple[torch.Size, torch.dtype, torch.device], ...],
    options: tuple[tuple[str, int | bool], ...],
) -> Callable[..., Results]:
    """Compile one pass for contiguous tensors of these shapes; it takes the mask's tensors, then these."""
    leaves = mask.as_tuple()
    positions = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*given: torch.Tensor) -> Results:
        filled = list(leaves)
        for position, tensor in zip(positions, given[: len(positions)], strict=True):
            filled[position] = tensor
        return function(tuple(filled), dict(options), *given[len(positions) :])

    with FakeTensorMode() as mode:
        given = [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in shapes]
        examples: list[Any] = [*map(mode.from_tensor, _tensors_of(mask)), *given]
        graph = make_fx(run)(*examples)
    compiled: Callable[..., Results] = inductor.compile(graph, examples)
    return compiled
