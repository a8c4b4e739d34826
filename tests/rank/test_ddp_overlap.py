"""DDP's communication hook in a world of one rank: the buckets that it sums, and the gradients."""

import pytest
import torch
from aorta_workloads.ddp_overlap.hook import BucketReduction, ReduceScatterStress, wrap
from torch import nn

from tests.rank.ranks import Requests, doubling, own_group

CPU = torch.device("cpu")
# A bucket holds two of the four matrices.
BUCKET_MB = 2 * 64 * 64 * 4 / 2**20


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory):
    with own_group(tmp_path_factory.mktemp("store")):
        yield


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def backward(model, steps, finish=lambda: None):
    """Return the gradients of all steps."""
    found = []
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 64), step + 1.0)).sum().backward()
        finish()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("static_graph", [True, False])
def test_gradients_are_those_of_the_model_alone(overlap, bucket_view, static_graph):
    expected = backward(make_model(), 3)
    stress = ReduceScatterStress(CPU, clone=True, beside=overlap)
    reduction = BucketReduction(CPU, overlap=overlap, stress=stress)
    wrapped = wrap(
        make_model(), reduction, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=bucket_view, static_graph=static_graph
    )
    found = backward(wrapped, 3, reduction.finish)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # Two matrices per bucket.
    assert (reduction.num_in_last_step, stress.num_in_last_step) == (2, 2)


@pytest.mark.parametrize("bucket_view", [True, False])
def test_without_overlap_nothing_is_summed_before_backward_has_ended(bucket_view):
    summed = []
    reduction = BucketReduction(CPU, overlap=False, stress=None)
    wrapped = wrap(
        make_model(), reduction, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=bucket_view, static_graph=False
    )
    alone = backward(make_model(), 1)
    with Requests(lambda *request: summed.append(request[0]) or doubling(*request)):
        wrapped(torch.ones(2, 64)).sum().backward()
        assert summed == []
        reduction.finish()
    # DDP uses a single bucket in the first step.
    assert summed == ["allreduce_"]
    for parameter, local in zip(wrapped.parameters(), alone, strict=True):
        assert torch.equal(parameter.grad, 2 * local)


@pytest.mark.parametrize("clone", [True, False])
def test_stress_reads_the_bucket_or_a_copy_of_it(clone):
    sources, buffer = [], torch.ones(7)
    with Requests(lambda _name, args, _is_async: sources.append(args[1].data_ptr())):
        stress = ReduceScatterStress(CPU, clone=clone, beside=False)
        stress.start(buffer)
        stress.finish()
    assert [source == buffer.data_ptr() for source in sources] == [not clone]
