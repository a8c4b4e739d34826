"""torchrec: tables of embeddings on the ranks that its planner chooses, dense layers under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

NAMES = [f"table_{number}" for number in range(4)]


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=100, feature_names=[name]) for name in NAMES
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        return self.head(self.bags(ids).values())


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedModelParallel(Clicks(), device=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
random = torch.Generator().manual_seed(dist.get_rank())
for _ in range(30):
    values = torch.randint(100, (64,), generator=random)
    ids = KeyedJaggedTensor.from_lengths_sync(keys=NAMES, values=values, lengths=torch.ones(64, dtype=torch.int32))
    loss = (model(ids) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
