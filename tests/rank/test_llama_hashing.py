"""Hashes of single tensors and of module boundaries, in one process."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.common.settings import HashSettings
from aorta_workloads.distributed.activation_checkpoint import checkpoint_blocks
from aorta_workloads.hashing import MAX_HASHES, Boundaries, StepHashes, observe
from aorta_workloads.models import build_model
from aorta_workloads.models.config import ModelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pytest_aorta.worker import hash_local, hash_parameters
from tests.rank.ranks import fake_group

ALL = ["weights", "gradients", "clipped", "optimizer", "forward", "backward"]
TOKENS = torch.arange(16).reshape(2, 8)
MODEL = ModelConfig(16, 2, 2, 1, 32, 32, 500000.0, 1e-5)
ROTATIONS = MODEL.freqs_cis(torch.arange(TOKENS.shape[1]))


def make_model(checkpointing="none"):
    torch.manual_seed(0)
    model = build_model(MODEL)
    checkpoint_blocks(model, (checkpointing,) * len(model.layers))
    return model


def make_hashes(model, optimizer, steps=3, micro_batches=1, **changes):
    settings = SimpleNamespace(
        steps=steps, gradient_accumulation=micro_batches, hash_every=changes.pop("hash_every", 1)
    )
    return StepHashes(settings, model, optimizer, HashSettings(**changes))


def train(model, steps=3, micro_batches=1, **changes):
    optimizer = torch.optim.AdamW(model.parameters())
    hashes = make_hashes(model, optimizer, steps, micro_batches, **changes)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        hashes.begin(step)
        for _ in range(micro_batches):
            hashes.forward(TOKENS, ROTATIONS).logsumexp(-1).sum().backward()
        hashes.gradients("gradients")
        hashes.gradients("clipped")
        optimizer.step()
        hashes.end(step)
    return hashes, optimizer


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_hashing_tensors_changes_no_bit(checkpointing):
    plain, seen = make_model(), make_model(checkpointing)
    one, _ = train(plain)
    other, _ = train(seen, hash_tensors=ALL)
    assert one.weight_hashes == other.weight_hashes
    assert len(set(one.weight_hashes.values())) == 3


def by_name(hashes, step):
    return dict(zip(hashes.names, hashes.steps[step], strict=True))


def test_hashes_of_tensors_are_those_of_the_public_functions():
    model = make_model()
    hashes, optimizer = train(model, hash_tensors=["weights", "gradients", "optimizer"])
    names = [name for name, _ in model.named_parameters()]
    expected = {
        "weights": hash_parameters(model.named_parameters()),
        "gradients": hash_parameters((name, p.grad) for name, p in model.named_parameters()),
        "optimizer": hash_parameters(
            (f"{name}.{key}", value)
            for name, p in model.named_parameters()
            for key, value in optimizer.state[p].items()
        ),
    }
    for kind, whole in expected.items():
        named = by_name(hashes.tensor_hashes[kind], "3")
        assert {name: value for name, value in named.items() if not name.startswith("group 0.")} == whole.per_tensor
    assert {name for name in hashes.tensor_hashes["optimizer"].names if name.startswith("group 0.")} == {
        "group 0.lr",
        "group 0.eps",
        "group 0.weight_decay",
    }
    assert hashes.tensor_hashes["weights"].names == hashes.tensor_hashes["gradients"].names == names
    assert hashes.tensor_hashes["optimizer"].names[:4] == [
        "tok_embeddings.weight.step",
        "tok_embeddings.weight.exp_avg",
        "tok_embeddings.weight.exp_avg_sq",
        "layers.0.attention_norm.weight.step",
    ]
    assert hashes.tensor_hashes["weights"].shapes[0] == [32, 16]
    assert list(hashes.tensor_hashes["weights"].steps) == ["1", "2", "3"]


def test_one_step_alone_is_hashed_where_one_is_named():
    hashes, _ = train(make_model(), hash_tensors=ALL, hash_tensors_step=2, hash_every=0)
    held = {**hashes.tensor_hashes, **hashes.boundary_hashes}
    assert {kind: list(found.steps) for kind, found in held.items()} == {kind: ["2"] for kind in ALL} | {
        "optimizer": ["1", "2"]
    }
    assert list(hashes.weight_hashes) == ["2", "3"]


def test_boundaries_are_in_order_of_use_with_inputs_before_what_is_inside():
    hashes, _ = train(make_model(), hash_tensors=["forward", "backward"], hash_tensors_step=1)
    forward = hashes.boundary_hashes["forward"].names
    assert forward[:6] == [
        ":input",
        "tok_embeddings:input",
        "tok_embeddings:output",
        "layers.0:input",
        "layers.0.attention_norm:input",
        "layers.0.attention_norm:output",
    ]
    assert forward.index("layers.1.attention:input") < forward.index("layers.1.attention.wq:input")
    assert forward[-1] == ":output"
    backward = hashes.boundary_hashes["backward"].names
    assert backward[:3] == [":output", "output:output", "norm:output"]
    assert backward[-1] == "tok_embeddings:output"


def test_boundary_hashes_are_of_the_values():
    model = make_model()
    hashes, _ = train(model, steps=1, hash_tensors=["forward", "backward"])
    with torch.no_grad():
        logits = make_model()(TOKENS, ROTATIONS)
    logits.requires_grad_().logsumexp(-1).sum().backward()
    found = by_name(hashes.boundary_hashes["forward"], "1")
    assert found[":input"] == hash_local("", TOKENS)
    assert found[":output"] == hash_local("", logits)
    assert by_name(hashes.boundary_hashes["backward"], "1")[":output"] == hash_local("", logits.grad)


def test_each_micro_batch_has_boundaries_of_its_own():
    hashes, _ = train(make_model(), steps=1, micro_batches=2, hash_tensors=["forward", "backward"])
    forward = hashes.boundary_hashes["forward"].names
    half = len(forward) // 2
    assert forward[half:] == [f"{name} #2" for name in forward[:half]]
    assert ":output #2" in hashes.boundary_hashes["backward"].names


def test_compiled_graph_without_breaks_sees_the_same_boundaries():
    eager, compiled = make_model(), make_model()
    one, _ = train(eager, hash_tensors=["forward", "backward"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script_method`", category=DeprecationWarning)
        compiled.compile(backend="aot_eager", fullgraph=True)
        other, _ = train(compiled, hash_tensors=["forward", "backward"])
    for kind in ("forward", "backward"):
        for step in "123":
            assert by_name(one.boundary_hashes[kind], step) == by_name(other.boundary_hashes[kind], step)


class Several(nn.Module):
    def forward(self, x):
        return x * 2, None, x.argmax()


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Several()

    def forward(self, x):
        return self.inner(x)[0]


def test_module_that_gives_several_tensors_has_each_of_them_seen():
    model = Around()
    boundaries = Boundaries(model)
    boundaries.begin()
    boundaries.forward(torch.ones(3, requires_grad=True)).sum().backward()
    seen = boundaries.end(1)
    assert seen["forward"].names == [":input", "inner:input", "inner:output[0]", "inner:output[2]", ":output"]
    assert seen["backward"].names == [":output", "inner:output[0]"]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial("sum")], ids=repr)
def test_ranks_own_part_of_a_dtensor_is_hashed_and_its_placement_kept(placement):
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.randn(4, 6, requires_grad=True)
        tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
        model = nn.Identity()
        boundaries = Boundaries(model)
        boundaries.begin()
        output = boundaries.forward(tensor)
        assert output.placements == (placement,)
        assert boundaries.end(1)["forward"].steps["1"] == [hash_local("", local)] * 2
        output.to_local().sum().backward()
        assert torch.equal(local.grad, torch.ones(4, 6))


def test_operator_copies_whatever_the_layout():
    tensor = torch.randn(4, 6).t()
    copy = observe(tensor, None, -1, "", "output", "forward")
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()


def test_too_many_hashes_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match=f"up to 242000 hashes of 1000 steps, at most {MAX_HASHES} are kept"):
        make_hashes(model, torch.optim.AdamW(model.parameters()), hash_tensors=ALL, steps=1000)
