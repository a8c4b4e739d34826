"""transformers: Trainer with a model and a data set of its own."""

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def forward(self, inputs, labels=None):
        found = self.net(inputs)
        return {"loss": (found - labels).square().mean(), "logits": found}


torch.manual_seed(0)
data = [{"inputs": row, "labels": row} for row in torch.randn(480, 16)]
arguments = TrainingArguments(
    "trained",
    use_cpu=True,
    per_device_train_batch_size=8,
    num_train_epochs=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=data).train()
