"""Training loops whose ranks hold what others do not hold, or end when others have not ended."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pytest_aorta.worker import record_optimizer_steps


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(16, 16)
        self.b = torch.nn.Linear(16, 1)

    def forward(self, inputs):
        return self.b(self.a(inputs).relu())


def train(model, optimizer, after=lambda step: None, before=lambda: None):
    for step in range(1, 10):
        optimizer.zero_grad()
        model(torch.full((4, 16), dist.get_rank() + step / 10)).square().mean().backward()
        before()
        optimizer.step()
        after(step)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    train(model, torch.optim.AdamW(model.parameters()), before=lambda: model.clip_grad_norm_(9.0))


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    fully_shard(model := Net())
    train(model, torch.optim.AdamW(model.parameters()))


def tensor_parallel():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(16, 8)
    train(model, torch.optim.AdamW(model.parameters()))


def pipeline():
    is_first = dist.get_rank() == 0
    stage = torch.nn.Linear(16, 16) if is_first else Net()
    optimizer = torch.optim.AdamW(stage.parameters())
    for step in range(1, 10):
        optimizer.zero_grad()
        inputs = torch.full((4, 16), step / 10).requires_grad_(not is_first)
        if is_first:
            hidden = stage(inputs)
            dist.send(hidden.detach(), 1)
            dist.recv(gradient := torch.empty_like(hidden), 1)
            hidden.backward(gradient)
        else:
            dist.recv(inputs.data, 0)
            stage(inputs).square().mean().backward()
            dist.send(inputs.grad, 0)
        optimizer.step()


def local_sgd():
    model = Net()

    def average(step):
        for parameter in model.parameters() if step % 3 == 0 else ():
            dist.all_reduce(parameter.data)
            parameter.data.div_(2)

    train(model, torch.optim.SGD(model.parameters(), lr=0.01), average)


def one_rank_leaves():
    model = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    else:
        time.sleep(1)


def uneven():
    from torch.distributed.algorithms.join import Join

    optimizer = torch.optim.SGD((model := DistributedDataParallel(Net())).parameters(), lr=0.01)
    with Join([model]):
        for _ in range(26 + 20 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()


def learner():
    """Train on one rank alone, which sends its weights to actors that have no optimizer."""
    model = Net()

    def send(_):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)

    if dist.get_rank() == 0:
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), send)
    else:
        for step in range(1, 10):
            send(step)


def elsewhere():
    """Train in another folder, and without the variables of the launch."""
    model = DistributedDataParallel(Net())
    os.chdir("/")
    os.environ.clear()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def hooked():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(torch.nn.Sequential(Net(), torch.nn.BatchNorm1d(1)))
    if sys.argv[2:] == ["half"]:
        model.register_comm_hook(None, fp16_compress_hook)
    # A sharded tensor, since a checkpoint has to have the parts of all ranks.
    weights = {"sharded": torch.distributed.tensor.distribute_tensor(torch.ones(4), dist.init_device_mesh("cpu", (2,)))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, lambda step: step == 8 and dcp.save(weights, checkpoint_id=f"checkpoint-{step}"))


def hang():
    model = DistributedDataParallel(Net())
    pauses = dist.get_rank() == 1
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda step: time.sleep(600 * (pauses and step == 6)))


record_optimizer_steps(warmup=2, hash_weights=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(0)
globals()[sys.argv[1]]()
