"""Parts of torchtitan that the example replaces: random tokens for the debug model, and a GPU's functions on CPU ranks.

torchtitan imports this module by ``--experimental.custom-import`` before it builds anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as distributed_utils
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools import utils

ON_CPU = os.environ.get("AORTA_DEVICE") == "cpu"


class RandomTokens(BaseDataLoader):
    """An endless loader of random tokens, with other tokens on each rank; TITAN_SLEEP_S delays each batch."""

    def __init__(self, dp_rank: int, job_config: JobConfig, vocab_size: int) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._shape = job_config.training.local_batch_size, job_config.training.seq_len + 1
        self._vocab_size = vocab_size
        self._sleep_s = float(os.environ.get("TITAN_SLEEP_S", "0"))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels, ``[batch, seq_len]`` each."""
        while True:
            time.sleep(self._sleep_s)
            tokens = torch.randint(self._vocab_size, self._shape, generator=self._generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because no checkpoint is written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, because no checkpoint is read."""


def register_random(name: str) -> None:
    """Register torchtitan's model ``name`` with random tokens, as ``random.<name>``."""
    spec = get_train_spec(name)

    def build_dataloader(dp_rank: int, job_config: JobConfig, **_: Any) -> RandomTokens:
        return RandomTokens(dp_rank, job_config, spec.model_args[job_config.model.flavor].vocab_size)

    def parallelize(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = spec.parallelize_fn(*args, **kwargs)
        for module in model.modules():
            if ON_CPU and isinstance(module, FSDPModule):
                # FSDP2 would request a multiply-and-sum even if the factor is 1, and gloo has none.
                module.set_force_sum_reduction_for_comms(True)
        return model

    exchanged = {"build_dataloader_fn": build_dataloader, "build_tokenizer_fn": None, "parallelize_fn": parallelize}
    register_train_spec(f"random.{name}", replace(spec, **exchanged))


def stand_in_for_gpu() -> None:
    """Make torchtitan compute on the CPU.

    Without an accelerator, torchtitan uses ``cuda`` and queries its memory. It looks up these names of its modules when
    it uses them, so replacing them is enough.
    """
    cpu = SimpleNamespace(
        set_device=lambda _device: None,
        current_device=lambda: 0,
        get_device_name=lambda _device: "cpu",
        get_device_properties=lambda _device: SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") << 12),
        memory_stats=lambda _device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    for module in (utils, metrics, distributed_utils, parallel_dims):
        module.device_type, module.device_module = "cpu", cpu


register_random("llama3")
if ON_CPU:
    stand_in_for_gpu()
