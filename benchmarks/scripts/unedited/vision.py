"""Small network with batch normalization under DDP, with autocast and augmented images."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 3
dist.init_process_group("gloo")
torch.manual_seed(5)
network = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(16, 10),
)
model = DistributedDataParallel(network)
images = torch.randn(160, 3, 8, 8)
images = (images - images.mean()) / images.std()
data = TensorDataset(images, torch.randint(0, 10, (160,)))
sampler = DistributedSampler(data, shuffle=True, drop_last=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20])
torch.manual_seed(10 + dist.get_rank())
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for batch, labels in loader:
        flipped = torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, batch, batch.flip(3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(flipped), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
dist.destroy_process_group()
