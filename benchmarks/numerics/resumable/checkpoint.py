"""Trains under FSDP2, saves with torch.distributed.checkpoint every few steps, and goes on from the last checkpoint."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
for layer in (model[0], model[3], model):
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
# Of what ranks save by one name, DCP keeps that of one rank.
random_name = f"random {dist.get_rank()}"


class State:
    """What is saved, as DCP's protocol of stateful objects."""

    step = 0

    def state_dict(self) -> dict[str, object]:
        """Return the state to save."""
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": self.step}
        return saved | {random_name: torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a state."""
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state[random_name])
        self.step = state["step"]


state = State()
if arguments.resume:
    dcp.load({"state": state}, checkpoint_id=max(arguments.resume.glob("step-*")))
while state.step < arguments.steps:
    batch = torch.Generator().manual_seed(2 * state.step + dist.get_rank())
    model(torch.randn(4, 8, generator=batch)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    state.step += 1
    if state.step % 3 == 0:
        dcp.save({"state": state}, checkpoint_id=Path("checkpoints") / f"step-{state.step:03}")
dist.destroy_process_group()
