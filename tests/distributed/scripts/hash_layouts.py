"""Trains a tiny Llama for 25 steps under FSDP on 4 ranks and records the weight hash in every layout of 4 ranks.

The recorded step of a hash is the number of its layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from aorta_workloads.models import build_model
from aorta_workloads.models.common.chunked_loss import summed_cross_entropy
from aorta_workloads.models.common.data import initialize, sequences
from aorta_workloads.models.common.decoder import Decoder
from aorta_workloads.models.config import ModelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_aorta.worker import hash_parameters, recorder

# Dimensions that the number of ranks does not divide.
CONFIG = ModelConfig(60, 2, 6, 3, 101, 203, 500000.0, 1e-5)
STEPS, SEQ_LEN = 25, 16
TENSOR_PARALLEL = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "tok_embeddings": 0, "output": 0}


def shard(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Decoder) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        with recorder.step():
            tokens = sequences(0, step, range(dist.get_rank(), dist.get_rank() + 1), SEQ_LEN, CONFIG.vocab_size)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1], CONFIG.freqs_cis(torch.arange(SEQ_LEN)))
            summed_cross_entropy(logits, tokens[:, 1:]).backward()
            optimizer.step()


def copy_of(state: dict[str, torch.Tensor]) -> Decoder:
    model = build_model(CONFIG)
    model.load_state_dict(state)
    return model


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for name, module in list(model.named_modules()):
        dim = TENSOR_PARALLEL.get(name.rpartition(".")[2])
        if dim is not None:
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))
    return model


def main() -> None:
    dist.init_process_group("gloo")
    recorder.start(torch.device("cpu"))
    trained = build_model(CONFIG)
    initialize(trained, CONFIG.n_layers, 0)
    train(shard(trained, init_device_mesh("cpu", (4,))))
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in trained.state_dict().items()
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    layouts = {
        "fsdp 4": (trained, None),
        "fsdp 2": (shard(copy_of(state), mesh["shard"]), mesh["shard"].get_group()),
        "hsdp 2x2": (shard(copy_of(state), mesh), None),
        "fsdp 2 x tp 2": (shard(tensor_parallel(copy_of(state), mesh["shard"]), mesh["replicate"]), None),
        "ddp": (nn.parallel.DistributedDataParallel(copy_of(state)).module, None),
        "one rank": (copy_of(state), alone),
    }
    for number, (model, group) in enumerate(layouts.values(), 1):
        recorder.weight_hash(number, hash_parameters(model.named_parameters(), group).hex)


if __name__ == "__main__":
    main()
