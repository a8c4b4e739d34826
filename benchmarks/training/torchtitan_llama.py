"""Trains torchtitan's Llama 3 with its own trainer, timed by the recorder like this project's workloads.

benchmarks/training/llama_8b.py and llama.py launch this script with torchtitan's own options as arguments. torchtitan's
register_train_spec supplies the model with the tokens of this project's workloads, so that no tokenizer is needed, and
with a logger that keeps torchtitan's values. torchtitan imports the package ``datasets`` but uses it only for text: if
the package is not installed, an empty module of that name replaces it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from aorta_workloads.models.common.data import sequences

from pytest_aorta.worker import recorder

SYNTHETIC = "synthetic."
# The workloads' default.
_SEED = 0
LOGGED = {
    "torchtitan_tokens_per_s": "throughput(tps)",
    "torchtitan_memory_reserved_gib": "memory/max_reserved(GiB)",
    "torchtitan_memory_active_gib": "memory/max_active(GiB)",
    "torchtitan_loss": "loss_metrics/global_avg_loss",
}


def stand_in(name: str, *members: str) -> None:
    """Make ``import name`` succeed if the package is absent; the stand-in has no working members."""
    sys.modules[name] = ModuleType(name)
    for member in members:
        setattr(sys.modules[name], member, type(member, (), {}))


if importlib.util.find_spec("datasets") is None:
    stand_in("datasets", "Dataset", "load_dataset")
    stand_in("datasets.distributed", "split_dataset_by_node")

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402 - after the stand-in it needs
from torchtitan.components.metrics import (  # noqa: E402
    BaseLogger,
    MetricsProcessor,
    build_metrics_processor,
)
from torchtitan.config import ConfigManager, JobConfig  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


class RandomTokens(BaseDataLoader):
    """The tokens that the Llama workloads train on: inputs ``[batch, seq_len]``, and labels shifted by one."""

    def __init__(self, dp_rank: int, job_config: JobConfig, vocab_size: int) -> None:
        training = job_config.training
        own = range(dp_rank * training.local_batch_size, (dp_rank + 1) * training.local_batch_size)
        # Batches are made before the first step, as in the workloads.
        self._batches = [sequences(_SEED, step, own, training.seq_len, vocab_size) for step in range(training.steps)]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield a batch for each step."""
        for tokens in self._batches:
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, since no checkpoint is written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing."""


class LastLogged(BaseLogger):
    """Keeps torchtitan's last log entry: means and peaks of the steps since the entry before."""

    def log(self, metrics: dict[str, Any], step: int) -> None:  # noqa: ARG002 - as torchtitan calls it
        """Record the entry in place of an earlier step's entry."""
        for name, key in LOGGED.items():
            recorder.metric(name, metrics[key])


def build_recording_metrics(*args: Any) -> MetricsProcessor:
    """Return torchtitan's metrics, logged to the recorder."""
    processor = build_metrics_processor(*args)
    processor.logger = LastLogged()
    return processor


def register_synthetic(name: str, flavor: str, n_layers: int) -> None:
    """Register torchtitan's model ``name`` with random tokens and ``n_layers`` blocks, as ``synthetic.<name>``."""
    spec = get_train_spec(name)

    def build_dataloader(dp_rank: int, job_config: JobConfig, **_: Any) -> RandomTokens:
        return RandomTokens(dp_rank, job_config, spec.model_args[flavor].vocab_size)

    exchanged: dict[str, Any] = {
        "model_args": {flavor: replace(spec.model_args[flavor], n_layers=n_layers)},
        "build_dataloader_fn": build_dataloader,
        "build_tokenizer_fn": None,
        "build_metrics_processor_fn": build_recording_metrics,
    }
    register_train_spec(SYNTHETIC + name, replace(spec, **exchanged))


class RecordedTrainer(Trainer):
    """torchtitan's trainer, with each step timed."""

    def train_step(self, data_iterator: Any) -> None:
        """Train one step within a step of the recorder."""
        with recorder.step():
            super().train_step(data_iterator)


def main(arguments: list[str]) -> None:
    """Train by the arguments: the number of steps that are not recorded, the number of blocks, torchtitan's options."""
    warmup, n_layers, *options = arguments
    init_logger()
    config = ConfigManager().parse_args(options)
    register_synthetic(config.model.name.removeprefix(SYNTHETIC), config.model.flavor, int(n_layers))
    trainer = RecordedTrainer(config)
    recorder.start(trainer.device, warmup=int(warmup))
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
