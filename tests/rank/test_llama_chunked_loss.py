"""The output projection and the loss in chunks, against the loss of whole logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from aorta_workloads.models.common.chunked_loss import Output, in_chunks, linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rank.ranks import left_at_the_end, run_two_ranks

NUM_TOKENS, DIM, VOCAB = 40, 16, 96
DTYPES = [torch.float32, torch.bfloat16]


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TOKENS, DIM, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)


def whole(x, weight, labels):
    return F.cross_entropy((x @ weight.T).float(), labels, reduction="sum") / NUM_TOKENS


def chunked(x, weight, labels, num_chunks, fused=False):
    return linear_cross_entropy(x, weight, labels, NUM_TOKENS, num_chunks, fused, 0, "")[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3, 8])
def test_loss_and_gradients_are_those_of_whole_logits(dtype, num_chunks):
    x, weight, labels = tensors(dtype)
    expected, loss = whole(x, weight, labels), chunked(x, weight, labels, num_chunks)

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(*(torch.autograd.grad(value, (x, weight)) for value in (loss, expected)), strict=True)
    rounding = {"rtol": 0.02, "atol": 2e-3} if dtype == torch.bfloat16 else {}
    for one, other in pairs:
        torch.testing.assert_close(one, other, **rounding)


@pytest.mark.parametrize("num_chunks", [8, 40])
def test_the_gradient_of_the_weight_is_rounded_once_for_any_number_of_chunks(num_chunks):
    x, weight, labels = tensors(torch.bfloat16)
    whole, in_parts = (torch.autograd.grad(chunked(x, weight, labels, number), weight)[0] for number in (1, num_chunks))
    # A sum in float32 between two numbers of bfloat16, which has 8 significant bits, may be rounded to either.
    torch.testing.assert_close(in_parts, whole, rtol=2**-7, atol=0)


def test_backward_makes_no_second_gradient_of_the_weight():
    x, weight, labels = tensors(torch.bfloat16)
    loss = chunked(x, weight, labels, 2)
    with LargestTensor() as largest:
        torch.autograd.grad(loss, (x, weight))
    assert [numel for numel in largest.new if numel == weight.numel()] == []


def test_each_token_has_the_same_gradient_for_every_number_of_chunks():
    x, weight, labels = tensors(torch.bfloat16)
    gradients = [torch.autograd.grad(chunked(x, weight, labels, num_chunks), (x, weight)) for num_chunks in (1, 1, 8)]
    assert all(torch.equal(gradients[0][0], other[0]) for other in gradients)
    assert torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_fused_kernels_compute_the_same_up_to_rounding():
    x, weight, labels = tensors(torch.float32)
    results = [chunked(x, weight, labels, 2, fused) for fused in (False, True)]
    torch.testing.assert_close(results[1], results[0])
    pairs = zip(*(torch.autograd.grad(result, (x, weight)) for result in results), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_the_gradient_of_the_loss_scales_both_gradients():
    x, weight, labels = tensors(torch.float32)
    plain, dropped = (chunked(x, weight, labels, 2) for _ in range(2))
    plain.backward(torch.full_like(plain, 2.0))
    expected = torch.autograd.grad(chunked(x, weight, labels, 2), (x, weight))
    assert torch.equal(x.grad, 2 * expected[0])
    assert torch.equal(weight.grad, 2 * expected[1])
    assert all(not grad.any() for grad in torch.autograd.grad(dropped, (x, weight), torch.zeros_like(dropped)))


def _split_the_vocabulary(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, weight, labels = (tensor.detach() for tensor in tensors(torch.float32))
    rows = slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2)
    with left_at_the_end():
        group = dist.group.WORLD.group_name
        loss, grad_x, grad_weight = in_chunks(x, weight[rows], labels, NUM_TOKENS, 3, False, rows.start, group)
        losses = [torch.empty(()), torch.empty(())]
        dist.all_gather(losses, loss)
        dist.all_reduce(grad_x)
    assert torch.equal(*losses)
    expected = in_chunks(x, weight, labels, NUM_TOKENS, 3, False, 0, "")
    torch.testing.assert_close((loss, grad_x, grad_weight), (*expected[:2], expected[2][rows]))


def test_ranks_that_split_the_vocabulary_have_the_loss_of_the_whole(tmp_path):
    run_two_ranks(_split_the_vocabulary, str(tmp_path))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_no_tensor_has_more_logits_than_one_chunk(num_chunks):
    x, weight, labels = (tensor.detach() for tensor in tensors(torch.bfloat16))
    with LargestTensor() as largest:
        in_chunks(x, weight, labels, NUM_TOKENS, num_chunks, False, 0, "")
    assert largest.num_elements == NUM_TOKENS // num_chunks * VOCAB


def test_the_model_around_the_operator_has_no_logits():
    output = Output(DIM, VOCAB)
    output.num_chunks = 5
    x, _, labels = tensors(torch.float32)
    with LargestTensor() as largest:
        output(x.unsqueeze(0), labels.unsqueeze(0), NUM_TOKENS).backward()
    assert largest.num_elements == output.weight.numel() < NUM_TOKENS * VOCAB


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator returns, and the sizes of all that it has allocated."""

    def __init__(self):
        super().__init__()
        self.num_elements, self.new = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = {tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for result in results if isinstance(results, tuple) else [results]:
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.numel())
                self.new += [result.numel()] * (result.data_ptr() not in given)
        return results
