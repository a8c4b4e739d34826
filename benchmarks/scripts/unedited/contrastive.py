"""Two towers under FSDP2 whose embeddings are gathered: a class with a config, a gradient scaler and a schedule."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    width: int = 24
    depth: int = 2
    lr: float = 1e-3
    batch: int = 8
    epochs: int = 3
    workers: int = 0
    init_scale: float = 1024.0


class Pairs(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(11)
        self.images = torch.randn(size, 12, generator=generator)
        self.texts = self.images.roll(1, 1) + 0.1 * torch.randn(size, 12, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "text": self.texts[index]}


def tower(config):
    layers = [nn.Linear(12, config.width)]
    for _ in range(config.depth):
        layers += [nn.LayerNorm(config.width), nn.Tanh(), nn.Linear(config.width, config.width)]
    return nn.Sequential(*layers)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.image, self.text = tower(config), tower(config)
        self.logit_scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, batch):
        image, text = F.normalize(self.image(batch["image"])), F.normalize(self.text(batch["text"]))
        everyone = torch.cat(collectives.all_gather(text))
        logits = image @ everyone.t() * self.logit_scale.exp()
        labels = torch.arange(len(image)) + dist.get_rank() * len(image)
        return F.cross_entropy(logits, labels)


class Trainer:
    def __init__(self, config):
        self.config, self.step = config, 0
        torch.manual_seed(2)
        self.model = Model(config)
        fully_shard(self.model.image)
        fully_shard(self.model.text)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, config.lr, total_steps=40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=config.init_scale)
        self.sampler = DistributedSampler(Pairs(172), seed=4, drop_last=False)
        self.loader = DataLoader(
            Pairs(172), config.batch, sampler=self.sampler, num_workers=config.workers, drop_last=True
        )

    def train(self):
        for epoch in range(self.config.epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.train_step(batch)

    def train_step(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.step += 1


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Trainer(Config()).train()
    dist.destroy_process_group()
