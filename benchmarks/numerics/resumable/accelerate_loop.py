"""Trains with accelerate, saves its state every few steps, and goes on from the last one."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()

# Without it, the order of an epoch is drawn when the epoch begins, which a restart does again.
order = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=order)
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator())
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
set_seed(accelerator.process_index)

step = 0
if arguments.resume:
    folder = max(arguments.resume.glob("step-*"))
    accelerator.load_state(folder)
    step = int(folder.name.removeprefix("step-"))
while step < arguments.steps:
    epoch, position = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for inputs, labels in accelerator.skip_first_batches(loader, position):
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 3 == 0:
            accelerator.save_state(Path("checkpoints") / f"step-{step:03}")
        if step == arguments.steps:
            break
accelerator.end_training()
