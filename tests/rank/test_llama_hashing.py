"""Hashes of single tensors, in one process."""

from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.common.settings import HashSettings
from aorta_workloads.distributed.activation_checkpoint import checkpoint_blocks
from aorta_workloads.hashing import MAX_HASHES, StepHashes
from aorta_workloads.models import build_model
from aorta_workloads.models.config import ModelConfig

from pytest_aorta.worker import hash_parameters

ALL = ["weights", "gradients", "clipped", "optimizer"]
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
            model(TOKENS, ROTATIONS).logsumexp(-1).sum().backward()
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
    assert {kind: list(found.steps) for kind, found in hashes.tensor_hashes.items()} == {
        kind: ["2"] for kind in ALL
    } | {"optimizer": ["1", "2"]}
    assert list(hashes.weight_hashes) == ["2", "3"]


def test_too_many_hashes_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match=f"up to 126000 hashes of 1000 steps, at most {MAX_HASHES} are kept"):
        make_hashes(model, torch.optim.AdamW(model.parameters()), hash_tensors=ALL, steps=1000)
