"""Experts: routing, grouping and the exchange between ranks against every expert applied to every token."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from aorta_workloads.distributed.activation_checkpoint import run_checkpointed
from aorta_workloads.distributed.expert import AllToAllDispatcher, balance_experts
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.models import build_model
from aorta_workloads.models.common.data import initial_value, initialize
from aorta_workloads.models.common.moe import Experts, MoeFeedForward, group_rows, route
from aorta_workloads.models.config import MixtureConfig, ModelConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.ranks import fake_group

DIM, HIDDEN = 8, 12


SOFTMAX = MixtureConfig()
SIGMOID = MixtureConfig(shared_experts=2, score_func="sigmoid", route_scale=2.5)


def make_moe(num_experts, top_k, mixture=SOFTMAX):
    moe = MoeFeedForward(DIM, HIDDEN, num_experts, top_k, mixture)
    for name, parameter in moe.named_parameters():
        # The distribution is wide, so that the outputs of experts differ.
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(len(name) + ord(name[-1])))
    return moe


def every_expert(moe, x):
    """Apply every expert to every token, and sum the outputs by the router's weights, which are 0 for most experts."""
    logits = moe.router(x)
    scores = torch.softmax(logits, dim=-1) if moe.mixture == SOFTMAX else torch.sigmoid(logits)
    kept = torch.zeros_like(scores).scatter(-1, scores.topk(moe.top_k).indices, 1.0) * scores
    weights = moe.mixture.route_scale * kept / kept.sum(dim=-1, keepdim=True)
    experts = moe.experts
    outputs = [
        F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
        for w1, w2, w3 in zip(experts.w1, experts.w2, experts.w3, strict=True)
    ]
    routed = sum(weights[..., number : number + 1] * out for number, out in enumerate(outputs))
    if moe.shared_experts is None:
        return routed
    shared = moe.shared_experts
    return routed + F.linear(F.silu(F.linear(x, shared.w1.weight)) * F.linear(x, shared.w3.weight), shared.w2.weight)


def gradients(moe, out, x):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad(out, [x, *moe.parameters()], direction)


def tokens(*shape, seed=0):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_equal_scores_go_to_the_first_experts():
    routing = route(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2)

    assert routing.selected_experts.tolist() == [[1, 2], [0, 1]]
    assert routing.top_scores.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_weights_are_the_shares_of_the_scores_that_are_kept():
    routing = route(torch.tensor([[3.0, 1.0, 2.0]]).log().bfloat16(), 2)

    assert routing.selected_experts.tolist() == [[0, 2]]
    assert routing.top_scores.dtype == torch.float32
    torch.testing.assert_close(routing.top_scores, torch.tensor([[0.6, 0.4]]), atol=1e-2, rtol=0)


def test_weights_of_sigmoids_add_up_to_the_scale_even_where_all_scores_vanish():
    mixture = MixtureConfig(score_func="sigmoid", route_scale=2.5)
    routing = route(torch.tensor([[0.0, 4.0, 2.0], [-200.0, -200.0, -200.0]]), 2, mixture)

    assert routing.selected_experts.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(routing.top_scores[0].sum(), torch.tensor(2.5))
    assert routing.top_scores[1].tolist() == [0.0, 0.0]


def test_forced_balance_takes_experts_in_turn_with_the_weights_of_their_scores():
    logits = torch.tensor([[0.0, 9.0, 2.0], [0.0, 0.0, 0.0]]).log_softmax(dim=-1).requires_grad_()
    routing = route(logits, 2, MixtureConfig(moe_force_load_balance=True))

    assert routing.selected_experts.tolist() == [[0, 1], [2, 0]]
    torch.testing.assert_close(routing.top_scores, torch.tensor([[0.0, 9.0], [0.0, 0.0]]).softmax(dim=-1))
    routing.top_scores[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


def test_a_bias_chooses_experts_and_does_not_weigh_them():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log().requires_grad_()
    routing = route(logits, 2, SOFTMAX, torch.tensor([-0.25, 0.0, 0.1]))

    assert routing.selected_experts.tolist() == [[1, 2], [2, 1]]
    torch.testing.assert_close(routing.top_scores, torch.tensor([[0.6, 0.4], [8 / 9, 1 / 9]]))
    routing.top_scores[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_tokens_of_experts_count_once_however_often_a_block_runs(kind, is_compiled):
    torch.compiler.reset()
    mixture = MixtureConfig(load_balance_coeff=0.01)
    model = build_model(ModelConfig(32, 1, 2, 2, 32, 64, 1e4, 1e-5, num_experts=4, mixture=mixture))
    initialize(model, 1, 0)
    (block,) = model.layers
    block.checkpoint = partial(run_checkpointed, kind)
    if is_compiled:
        block.compile(backend="aot_eager", fullgraph=True)
    freqs_cis = model.config.freqs_cis(torch.arange(8))
    for _ in range(3):
        block(torch.randn(2, 8, 32, requires_grad=True), freqs_cis).sum().backward()
    assert block.feed_forward.tokens_per_expert.sum() == 3 * 2 * 8 * 2


def test_the_bias_of_experts_with_few_tokens_rises_and_that_of_others_falls():
    moe = make_moe(4, 2, MixtureConfig(load_balance_coeff=0.5))
    with fake_group(2):
        mesh = ParallelMesh(ParallelDims(1, 2, 1, 1), "cpu")
        for _ in range(2):
            moe.tokens_per_expert.copy_(torch.tensor([5, 7, 1, 7]))
            balance_experts(moe, mesh, 0.5)
    assert moe.expert_bias.tolist() == [0.0, -1.0, 1.0, -1.0]
    assert moe.tokens_per_expert.tolist() == [0] * 4


@given(groups=st.lists(st.integers(0, 4), max_size=20))
def test_grouped_rows_are_in_order_and_come_back(groups):
    numbers = torch.tensor(groups, dtype=torch.int64)

    grouping = group_rows(numbers, 5)

    assert grouping.order.tolist() == sorted(range(len(groups)), key=groups.__getitem__)
    assert numbers[grouping.order][grouping.inverse].tolist() == groups
    assert grouping.counts.tolist() == [groups.count(number) for number in range(5)]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 6), batch=st.integers(1, 3), seq_len=st.integers(1, 5))
def test_chosen_experts_give_what_all_would_and_its_gradients(data, num_experts, batch, seq_len):
    moe = make_moe(num_experts, data.draw(st.integers(1, num_experts)), data.draw(st.sampled_from([SOFTMAX, SIGMOID])))
    x = tokens(batch, seq_len)

    out, expected = moe(x), every_expert(moe, x)

    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients(moe, out, x), gradients(moe, expected, x), atol=1e-4, rtol=1e-4)


class Board:
    """A board on which threads, one per rank, leave the data that they send."""

    def __init__(self, num_ranks):
        self.sent = [[] for _ in range(num_ranks)]
        self.barrier = threading.Barrier(num_ranks)

    def exchange(self, rank, parts):
        self.sent[rank] = parts
        self.barrier.wait(timeout=120)
        received = torch.cat([parts[rank] for parts in self.sent])
        self.barrier.wait(timeout=120)
        return received


class OnBoard(AllToAllDispatcher):
    """An exchange through a board between ranks that are threads."""

    def __init__(self, board, num_ranks, rank):
        self._board, self._num_ranks, self._rank = board, num_ranks, rank

    def _exchange_counts(self, counts):
        return self._board.exchange(self._rank, counts.chunk(self._num_ranks))

    def _exchange(self, rows, num_sent, num_received):
        received = self._board.exchange(self._rank, rows.split(num_sent))
        assert received.shape[0] == sum(num_received)
        return received


def own_experts(moe, num_ranks, rank):
    """Return the experts of one rank as views of all experts' parameters, so that gradients reach those parameters."""
    with torch.device("meta"):
        own = Experts(moe.num_experts // num_ranks, DIM, HIDDEN)
    for name, parameter in moe.experts.named_parameters():
        delattr(own, name)
        setattr(own, name, parameter.chunk(num_ranks)[rank])
    return own


def run_rank(moe, board, num_ranks, rank, x, outputs):
    alone = MoeFeedForward(DIM, HIDDEN, moe.num_experts, moe.top_k)
    alone.router, alone.experts = moe.router, own_experts(moe, num_ranks, rank)
    alone.dispatcher = OnBoard(board, num_ranks, rank)
    outputs[rank] = alone(x)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 4), per_rank=st.integers(1, 3), num_tokens=st.integers(1, 4))
def test_exchanged_tokens_get_what_all_experts_would_give_and_its_gradients(data, num_ranks, per_rank, num_tokens):
    moe = make_moe(num_ranks * per_rank, data.draw(st.integers(1, num_ranks * per_rank)))
    xs = [tokens(1, num_tokens, seed=rank) for rank in range(num_ranks)]
    board, outputs = Board(num_ranks), {}
    threads = [
        threading.Thread(target=run_rank, args=(moe, board, num_ranks, rank, x, outputs)) for rank, x in enumerate(xs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    x = torch.cat(xs)
    out, expected = torch.cat([outputs[rank] for rank in range(num_ranks)]), every_expert(moe, x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    found, wanted = (gradients(moe, given, xs[0]) for given in (out, expected))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_rank_to_which_no_token_goes_has_gradients_of_zero():
    experts = Experts(2, DIM, HIDDEN)
    rows = tokens(0)

    experts.evaluate(rows, torch.tensor([0, 0])).square().sum().backward()

    assert [parameter.grad.abs().sum().item() for parameter in experts.parameters()] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "is_residual"), [("w1", False), ("w2", True), ("w3", False)])
def test_what_experts_add_to_the_residual_stream_begins_smaller(name, is_residual):
    value = initial_value(f"layers.0.feed_forward.experts.{name}", torch.empty(4, 32, 32), 8, seed=0)

    assert value.std().item() == pytest.approx(0.02 / (4 if is_residual else 1), rel=0.1)
