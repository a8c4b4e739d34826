"""A feed-forward of experts: each token goes to the few experts that a router scores highest (arXiv 1701.06538).

Shared experts get every token besides (DeepSeekMoE, arXiv 2401.06066).

No token is dropped, and no expert has a capacity. No auxiliary loss balances the experts' loads; a bias of their scores
can (arXiv 2408.15664).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInputOutput, RowwiseParallel

from ...common.gradients import own_shard
from ..config import MixtureConfig
from .dtensors import SEQUENCE, Distributed, local_value
from .feed_forward import FeedForward

# Added to sums of sigmoids, which are 0 in float32 for very negative scores.
_NOT_ZERO = 1e-20


class Routing(NamedTuple):
    """The experts of each token, int64 ``[tokens, k]``, and the weights of their outputs, float32 ``[tokens, k]``."""

    selected_experts: torch.Tensor
    top_scores: torch.Tensor


class Dispatched(NamedTuple):
    """Rows in the order of this rank's experts, the number of rows of each, and how outputs go back.

    ``order`` is the place of each row as it arrived; ``num_sent`` and ``num_received`` are the rows to and from each
    rank. Without an exchange they are empty.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor | None = None
    num_sent: Sequence[int] = ()
    num_received: Sequence[int] = ()


class Grouping(NamedTuple):
    """Rows in the order of their groups: row ``order[n]`` comes ``n``-th, and row ``n`` comes ``inverse[n]``-th.

    ``counts`` holds the number of rows of each group.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    counts: torch.Tensor


_PLAIN = MixtureConfig()


def route(
    logits: torch.Tensor, top_k: int, mixture: MixtureConfig = _PLAIN, bias: torch.Tensor | None = None
) -> Routing:
    """Choose the experts with the highest of ``[tokens, num_experts]`` scores, and weights that add up to the scale.

    Scores are a float32 softmax over all experts or sigmoids; of equal scores the first wins. With
    ``moe_force_load_balance``, tokens take experts in turn. ``bias`` ``[num_experts]`` is added to the scores that
    choose experts, not to the weights.
    """
    is_softmax = mixture.score_func == "softmax"
    scores = torch.softmax(logits.float(), dim=-1) if is_softmax else logits.float().sigmoid()
    if mixture.moe_force_load_balance:
        num_tokens, num_experts = scores.shape
        turns = torch.arange(num_tokens * top_k, device=scores.device) % num_experts
        experts = turns.view(num_tokens, top_k)
        kept = scores.gather(-1, experts)
    elif bias is not None:
        experts = (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        kept = scores.gather(-1, experts)
    else:
        # A stable sort, since topk does not define which of equal scores it takes.
        scores, experts = scores.sort(dim=-1, descending=True, stable=True)
        kept, experts = scores[:, :top_k], experts[:, :top_k]
    total = kept.sum(dim=-1, keepdim=True)
    weights = kept / (total if is_softmax else total + _NOT_ZERO)
    return Routing(experts, weights if mixture.route_scale == 1 else weights * mixture.route_scale)


def group_rows(groups: torch.Tensor, num_groups: int) -> Grouping:
    """Order rows stably by ``groups`` ``[rows]``, the number of the group that each row belongs to."""
    order = groups.argsort(stable=True)
    # Neither bincount nor histc has deterministic kernels everywhere, and their output shapes depend on data.
    counts = (groups.unsqueeze(1) == torch.arange(num_groups, device=groups.device)).sum(dim=0)
    return Grouping(order, order.argsort(), counts)


# A trace needs a meta function, and the meta function of torch's own operator accepts only bfloat16.
@torch.library.custom_op("aorta::grouped_mm", mutates_args=())
def _traceable_grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = F.grouped_mm(left, right, offs=ends)
    return out


@_traceable_grouped_mm.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # Each group of rows has a matrix; or groups of columns are multiplied by groups of rows, with one matrix as each
    # result.
    shape = (left.shape[0], right.shape[-1]) if right.dim() == 3 else (ends.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(shape)


def _keep_factors(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _differentiate(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, matrices, ends = context.saved_tensors
    of_rows = _traceable_grouped_mm(gradient, matrices.transpose(1, 2), ends)
    # Matrices are transposed views, and so are their gradients.
    of_matrices = _traceable_grouped_mm(gradient.t(), rows, ends).transpose(1, 2)
    return of_rows, of_matrices, None


_traceable_grouped_mm.register_autograd(_differentiate, setup_context=_keep_factors)


# Both operators, as a dispatch mode receives them.
GROUPED_MMS = frozenset({torch.ops.aten._grouped_mm.default, torch.ops.aorta.grouped_mm.default})


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of ``rows`` ``[n, k]`` by its matrix of ``[groups, k, m]``.

    ``ends`` holds the number of rows up to and including each group.
    """
    if rows.dtype == torch.bfloat16:
        # Inductor generates kernels for torch's own operator.
        return F.grouped_mm(rows, matrices, offs=ends)
    out: torch.Tensor = _traceable_grouped_mm(rows, matrices, ends)
    return out


class GroupedSwiGlu(nn.Module):
    """A module that evaluates several SwiGLU feed-forwards, each on its group of rows."""

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor
    ) -> torch.Tensor:
        """Evaluate ``rows`` ``[n, dim]``, in the order of groups; ``counts`` holds the rows of each group."""
        ends = counts.cumsum(dim=0, dtype=torch.int32)
        w1, w2, w3 = (weight.transpose(1, 2) for weight in (w1, w2, w3))
        hidden = F.silu(grouped_mm(rows, w1, ends)) * grouped_mm(rows, w3, ends)
        return grouped_mm(hidden, w2, ends)


class Experts(nn.Module):
    """The stacked matrices of SwiGLU feed-forwards.

    ``w1`` and ``w3`` are ``[num_experts, hidden, dim]``, ``w2`` is ``[num_experts, dim, hidden]``.
    """

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.swiglu = GroupedSwiGlu()

    def evaluate(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Evaluate ``rows`` ``[n, dim]``, in the order of experts; ``counts`` holds the rows of each expert."""
        # Not a forward method, in which hooks would gather matrices: a recomputation of this region must call the same
        # operators (pytorch/pytorch#196862), and the hooks call others in backward.
        out: torch.Tensor = self.swiglu(rows, counts, *map(own_shard, (self.w1, self.w2, self.w3)))
        return out

    def surround(self, run: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        """Call ``run``, which evaluates rows; under torch 2.11, FSDP2 gathers the matrices around this call."""
        return run(*args)


class TokenDispatcher:
    """Brings rows to the ranks of their experts, and outputs back; here each rank holds all experts."""

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> Dispatched:
        """Return the rows of this rank's experts, given ``rows`` and ``counts`` in the order of all experts."""
        return Dispatched(rows, counts)

    def combine(self, out: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:  # noqa: ARG002
        """Return the outputs of all rows that :meth:`dispatch` was given, in their order."""
        return out


class MoeFeedForward(nn.Module):
    """A router and its experts, and shared experts that get every token.

    Attributes:
        dispatcher: brings rows to the ranks of their experts; expert parallelism replaces it.
        expert_bias: the bias of each expert's score, float32, under ``load_balance_coeff``; else None.
        tokens_per_expert: how many tokens this rank has sent to each expert since the last update of the bias.
    """

    expert_bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int, mixture: MixtureConfig = _PLAIN) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.mixture = num_experts, top_k, mixture
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden)
        self.shared_experts = FeedForward(dim, mixture.shared_experts * hidden) if mixture.shared_experts else None
        self.dispatcher = TokenDispatcher()
        is_balanced = mixture.load_balance_coeff is not None
        self.register_buffer("expert_bias", torch.zeros(num_experts) if is_balanced else None)
        counts = torch.zeros(num_experts, dtype=torch.int64) if is_balanced else None
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the outputs of each token's experts, ``[batch, seq_len, dim]``.

        The outputs of shared experts are added to it. With a bias, return the number of tokens of each expert too:
        activation checkpointing calls this method twice, and only its caller can count once.
        """
        tokens = x.flatten(0, 1)
        routing = route(local_value(self.router(tokens)), self.top_k, self.mixture, self.expert_bias)
        tokens = local_value(tokens)
        groups = group_rows(routing.selected_experts.flatten(), self.num_experts)
        copies = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        dispatched = self.dispatcher.dispatch(copies[groups.order], groups.counts)
        out = self.experts.evaluate(dispatched.rows, dispatched.counts)
        out = self.dispatcher.combine(out, dispatched)[groups.inverse]
        out = out.unflatten(0, (-1, self.top_k)) * routing.top_scores.unsqueeze(-1).type_as(out)
        summed: torch.Tensor = out.sum(dim=1).view(x.shape)
        if self.shared_experts is not None:
            summed = summed + self.shared_experts(x)
        return summed if self.expert_bias is None else (summed, groups.counts)

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Sum the outputs of experts, which ``split_experts`` splits; each rank routes all tokens, with equal results.

        The names are those of modules, beginning with a dot.
        """
        # Ranks count the same tokens.
        counts = () if self.expert_bias is None else (None,)
        shared: dict[str, ParallelStyle] = {
            ".shared_experts.w1": ColwiseParallel(),
            # The outputs of shared and of other experts are added before they are summed over ranks.
            ".shared_experts.w2": RowwiseParallel(output_layouts=Partial()),
            ".shared_experts.w3": ColwiseParallel(),
        }
        return {
            "": PrepareModuleInputOutput(
                input_layouts=(SEQUENCE,),
                desired_input_layouts=(Replicate(),),
                output_layouts=(Partial(), *counts),
                desired_output_layouts=(SEQUENCE, *counts),
            ),
            ".router": Distributed(weight=Replicate()),
            **(shared if self.shared_experts is not None else {}),
        }
