"""The output projection and the cross entropy as one operator, which processes the tokens in chunks.

``aorta::linear_cross_entropy`` computes the gradients of its inputs along with the loss, like Liger Kernel's fused
linear cross entropy (arXiv 2410.10989), so no pass holds more than the logits of one chunk. As an operator, it runs the
same kernels in an eager model and in every graph.

The loss differs by rounding from the loss of whole logits. So does the gradient of the weight, which adds up chunks in
float32. For a given number of chunks the bits are the same in both implementations of FSDP.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ...common.gradients import own_shard
from ...common.torch_private import functional_collectives as collectives

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Vocabulary(NamedTuple):
    """The part of the vocabulary that this rank's rows of the weight score.

    Attributes:
        first: the token id of the first row.
        group: the name of the process group that shares the vocabulary; empty without tensor parallelism.
    """

    first: int = 0
    group: str = ""


class Output(nn.Linear):
    """The projection to logits; given labels, the loss, chunk by chunk.

    Attributes:
        vocabulary: the rows that this rank holds; tensor parallelism replaces the attribute.
        num_chunks: the number of chunks of a micro-batch's tokens; with 0, there is only the projection.
        fused: whether inductor fuses the operations on a chunk's logits.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.vocabulary, self.num_chunks, self.fused = Vocabulary(), 1, False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, num_tokens: int = 1) -> torch.Tensor:
        """Return logits, or the cross entropy of ``labels``, summed over tokens and divided by ``num_tokens``."""
        if labels is None:
            return super().forward(x)
        given = x.flatten(0, 1), own_shard(self.weight), labels.flatten(), num_tokens
        loss: torch.Tensor = linear_cross_entropy(*given, self.num_chunks, self.fused, *self.vocabulary)[0]
        return loss


def in_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    num_tokens: int,
    num_chunks: int,
    fused: bool,
    first: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, and its gradients with respect to ``x`` ``[tokens, dim]`` and ``weight`` ``[vocabulary, dim]``.

    Under tensor parallelism, the loss is computed over the whole vocabulary, and the gradient of ``x`` is this rank's
    part of it.
    """
    x, weight = x.detach(), weight.detach()
    score, differentiate = map(make_fused, (_score, _differentiate)) if fused else (_score, _differentiate)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    grad_x, grad_weight = x.new_empty(x.shape), torch.zeros_like(weight, dtype=torch.float32)
    for rows in torch.arange(len(x)).chunk(num_chunks):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        logits, own_labels = x[part] @ weight.T, labels[part] - first
        logsumexp, scores = _over_ranks(torch.stack(score(logits, own_labels)), group)
        loss += (logsumexp - scores).sum()
        grad_logits = differentiate(logits, own_labels, logsumexp, 1 / num_tokens)
        torch.mm(grad_logits, weight, out=grad_x[part])
        _add_product(grad_weight, grad_logits.T, x[part])
    return loss / num_tokens, grad_x, grad_weight.type_as(weight)


linear_cross_entropy = torch.library.custom_op("aorta::linear_cross_entropy", in_chunks, mutates_args=())


@linear_cross_entropy.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> Results:
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    del inputs
    ctx.mark_non_differentiable(*output[1:])
    # Autograd would else make zeros as the gradients of both gradients.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    grad_x, grad_weight = ctx.saved_tensors
    # In place, since another tensor of the weight's size may not fit. Backward runs once: its graph is not retained.
    return grad_x.mul_(grad), grad_weight.mul_(grad), *[None] * 6


linear_cross_entropy.register_autograd(_gradients, setup_context=_remember)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to the float32 ``total`` without a rounded product in between."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # CPUs have no product of another dtype than its operands
        total.addmm_(left.float(), right.float())


def _score(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's logsumexp in float32, and the logit of its label; 0 if another rank has the label."""
    logits = logits.float()
    is_own, safe = _own(logits, labels)
    scores = logits.gather(1, safe.unsqueeze(1)).squeeze(1)
    return logits.logsumexp(1), torch.where(is_own, scores, 0)


def _differentiate(logits: torch.Tensor, labels: torch.Tensor, logsumexp: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of the scaled loss with respect to ``logits``, in their dtype."""
    is_own, safe = _own(logits, labels)
    is_label = (torch.arange(logits.shape[1], device=logits.device) == safe.unsqueeze(1)) & is_own.unsqueeze(1)
    attended = (logits.float() - logsumexp.unsqueeze(1)).exp()
    return (scale * (attended - is_label.float())).type_as(logits)


def _own(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which labels are columns of ``logits``, and the labels with 0 in place of all others."""
    is_own = (labels >= 0) & (labels < logits.shape[1])
    return is_own, torch.where(is_own, labels, 0)


def _over_ranks(values: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's logsumexp and its label's logit, combined over the ranks of ``group`` in their order.

    ``values`` ``[2, rows]`` contains both for this rank's part of the vocabulary.
    """
    if not group:
        return values[0], values[1]
    gathered = collectives.all_gather_tensor(values.unsqueeze(0), 0, group)  # type: ignore[arg-type]
    logsumexp, scores = collectives.wait_tensor(gathered).unbind(1)
    return logsumexp.logsumexp(0), scores.sum(0)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of whole logits, summed over tokens in float32.

    ``logits`` are ``[batch, seq_len, vocab_size]``, ``labels`` ``[batch, seq_len]``.
    """
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@cache
def make_fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled by inductor; it keeps no float32 copy of logits, and rounds differently."""
    return torch.compile(function, fullgraph=True, dynamic=False)
