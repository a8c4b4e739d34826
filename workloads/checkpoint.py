"""Weights, buffers and optimizer state as a torch.distributed.checkpoint, which a world of any layout can load."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint


def save(folder: str, model: nn.Module, optimizer: torch.optim.AdamW, *, is_async: bool = False) -> Future[Any] | None:
    """Write the logical tensors, each part once; collective over the world.

    With ``is_async``, write a copy in a thread while the caller trains further steps, and return what ends with it.
    """
    tensors = _named_tensors(model, optimizer)
    if not is_async:
        save_checkpoint(tensors, checkpoint_id=folder)
        return None
    # The thread's collectives have a group of their own, since those of training run meanwhile.
    pending = async_save(tensors, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    assert isinstance(pending, Future)  # of the default stager
    return pending


def load(folder: str, model: nn.Module, optimizer: torch.optim.AdamW) -> int:
    """Fill model and optimizer in place and return how many steps trained them; collective over the world.

    Hyperparameters come from the config, not from the checkpoint.
    """
    state = _named_tensors(model, optimizer)
    load_checkpoint(state, checkpoint_id=folder)
    return int(next(value for name, value in state.items() if name.endswith(".step")))


def _named_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Return every tensor to save; they share memory with the tensors in training."""
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name in buffers}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        if not state:
            # AdamW makes this state in its first step. Only its fused kernel keeps the count on the device.
            device = parameter.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return tensors
