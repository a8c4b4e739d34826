"""The state of training as a torch.distributed.checkpoint, which a world of any layout can load."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint


@contextmanager
def saving(
    folder: str | None, state: Callable[[], dict[str, torch.Tensor]], *, is_async: bool = False
) -> Iterator[None]:
    """Write the tensors of ``state()`` before the block, each part once; collective over the world.

    With ``is_async``, write a copy in a thread, beside the block. Without a ``folder``, write nothing.
    """
    pending = None
    if folder is not None and not is_async:
        save_checkpoint(state(), checkpoint_id=folder)
    elif folder is not None:
        # The thread's collectives have a group of their own, since those of training run meanwhile.
        pending = async_save(state(), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    yield
    if pending is not None:
        assert isinstance(pending, Future)  # of the default stager
        pending.result()


def load(folder: str, tensors: dict[str, torch.Tensor]) -> int:
    """Fill ``tensors`` in place and return how many steps trained them; collective over the world.

    The number of steps is in each tensor whose name ends with ``.step``.
    """
    load_checkpoint(tensors, checkpoint_id=folder)
    return int(next(value for name, value in tensors.items() if name.endswith(".step")))


def state_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Return weights, buffers and optimizer state; they share memory with the tensors in training.

    Hyperparameters come from the config, not from a checkpoint.
    """
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
