"""Trains with Lightning, which saves every few steps and goes on from the last checkpoint."""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()


class Model(lightning.LightningModule):
    """A regression whose learning rate decays."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, _):
        """Return the loss."""
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer, and the schedule of each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Sampler(DistributedSampler):
    """A sampler that counts epochs by steps, since Lightning's count is one less after a second restart."""

    def set_epoch(self, epoch):
        """Begin the epoch of the next step."""
        epoch = trainer.global_step // len(loader)
        super().set_epoch(epoch)


lightning.seed_everything(0)
data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=arguments.steps,
    use_distributed_sampler=False,
    logger=False,
    callbacks=[ModelCheckpoint("checkpoints", "{step:03}", every_n_train_steps=3, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
# Lightning skips no samples, so it has to save at the end of an epoch, here of 3 steps.
sampler = Sampler(data, trainer.world_size, trainer.global_rank)
loader = DataLoader(data, 4, sampler=sampler)
path = max(arguments.resume.glob("*.ckpt")) if arguments.resume else None
trainer.fit(Model(), loader, ckpt_path=path)
