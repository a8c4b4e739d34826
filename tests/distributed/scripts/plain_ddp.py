"""Trains the ranking model under DDP without a hook: ``plain_ddp.py CONFIG [unfused]``, with ``ranking``'s config."""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from aorta_workloads.common.settings import read_settings
from aorta_workloads.ranking.data import make_batch
from aorta_workloads.ranking.model import RankingModel, initialize
from aorta_workloads.ranking.settings import RankingSettings
from torch.nn.parallel import DistributedDataParallel

from pytest_aorta.worker import RankEnv, hash_parameters, recorder

settings = read_settings(RankingSettings, json.loads(sys.argv[1]))
env = RankEnv.read()
device = env.join("plain_ddp")
model = RankingModel(settings.model).to(device)
initialize(model, settings.seed)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, foreach=False, fused="unfused" not in sys.argv)
recorder.start(device)
for step in range(settings.steps):
    batch = make_batch(settings, step % settings.host_batches, env.rank, env.world_size)
    dense, rows, clicks = (tensor[0].to(device) for tensor in batch)
    with recorder.step():
        optimizer.zero_grad()
        # DDP takes the mean over ranks of each rank's mean over samples.
        F.binary_cross_entropy_with_logits(wrapped(dense, rows), clicks).backward()
        optimizer.step()
    recorder.weight_hash(step + 1, hash_parameters(model.named_parameters()).hex)
