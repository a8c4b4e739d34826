"""A GAN: two models, two optimizers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def batches(steps, size=16):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        yield torch.randn(8, size, generator=generator)


dist.init_process_group("gloo")
torch.manual_seed(0)
generator = DistributedDataParallel(torch.nn.Linear(16, 16), broadcast_buffers=False)
critic = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
noise = torch.Generator().manual_seed(7 + dist.get_rank())
for batch in batches(30):
    fake = generator(torch.randn(8, 16, generator=noise))
    loss = critic(fake.detach()).mean() - critic(batch).mean()
    for_critic.zero_grad()
    loss.backward()
    for_critic.step()
    for_generator.zero_grad()
    (-critic(fake).mean()).backward()
    for_generator.step()
dist.destroy_process_group()
