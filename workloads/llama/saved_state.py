"""Weights and optimizer state in a folder of torch.distributed.checkpoint, which a world of any layout can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint


def check_folders(config: Mapping[str, Any]) -> None:
    """Look at ``save_checkpoint`` and ``load_checkpoint`` before anything is trained.

    Raises:
        ValueError: a path is relative, what would be saved to holds files, or there is nothing to load.
    """
    for key in ("save_checkpoint", "load_checkpoint"):
        if (given := config[key]) is not None and not Path(given).is_absolute():
            raise ValueError(
                f"{key} is {given!r}, a relative path; ranks may run in any folder, so allowed are absolute"
            )
    save, load = config["save_checkpoint"], config["load_checkpoint"]
    if save is not None and Path(save).exists() and (not Path(save).is_dir() or any(Path(save).iterdir())):
        raise ValueError(f"save_checkpoint is {save!r}, which is there already; allowed is a new or an empty folder")
    if load is not None and not (Path(load) / ".metadata").is_file():
        raise ValueError(f"load_checkpoint is {load!r}, which holds no complete checkpoint: it has no file .metadata")


def save(folder: str, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Write the logical tensors, each part once; collective over the world."""
    save_checkpoint(_named_tensors(model, optimizer), checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.AdamW) -> int:
    """Fill model and optimizer in place and return how many steps they have been trained; collective over the world.

    Hyperparameters are not part of it: a config says them.
    """
    state = _named_tensors(model, optimizer)
    load_checkpoint(state, checkpoint_id=folder)
    return int(next(value for name, value in state.items() if name.endswith(".step")))


def _named_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Every tensor there is to save, sharing the memory of what is trained."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        if not state:
            # AdamW makes it in its first step, the count on the device for its fused kernel alone.
            device = parameter.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return tensors
