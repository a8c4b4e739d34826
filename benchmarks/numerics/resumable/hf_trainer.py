"""Trains with transformers' Trainer, which saves every few steps and goes on from the last checkpoint."""

import argparse
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()


class Model(torch.nn.Module):
    """A model that returns its loss, as Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


set_seed(0)
data = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(40)]
settings = TrainingArguments(
    output_dir="checkpoints",
    max_steps=arguments.steps,
    save_steps=3,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(Model(), settings, train_dataset=data)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.resume) if arguments.resume else None)
