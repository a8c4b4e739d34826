"""A training loop with faults that were reported in public: ``arranged.py --fault KIND --batch-size N --accumulate N``.

Ranks exchange gradients by hand, by DDP (``ddp``) or by FSDP2 (``fsdp2``).
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytest_aorta.worker import recorder

VOCABULARY, LENGTH = 50, 16


class Net(nn.Module):
    """Embedding, norm, feed-forward, head; ``fault`` changes what the module has."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, VOCABULARY)
        self.expert = nn.Linear(32, 32)
        self.statistics = nn.BatchNorm1d(32) if fault == "batch_norm" else nn.Identity()
        self.dropout = nn.Dropout(0.1 if "dropout" in fault else 0.0)
        self.register_buffer("load", torch.zeros(32))
        if fault in ("tied", "tied_reduced_twice"):
            self.head.weight = self.embedding.weight
        if fault.startswith("frozen"):
            self.embedding.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[batch, position, vocabulary]``."""
        x = self.norm(self.embedding(tokens))
        self.load = self.load + x.detach().mean((0, 1))
        x = self.statistics(x.flatten(0, 1)).view_as(x)
        expert = self.expert(x)
        if self.fault.endswith("branch_lost") and dist.get_rank() == 1:
            expert = expert.detach() + (0 if self.fault.startswith("ddp") else 0 * expert)
        x = self.dropout(x + self.down(F.gelu(self.up(x))) + expert)
        logits: torch.Tensor = self.head(x)
        return logits


def labels(fault: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the next token of each position; some have labels for a part of the positions only."""
    following = tokens.roll(-1, 1)
    if "tokens" in fault:
        masked = torch.arange(LENGTH)[None, :] < (torch.arange(len(tokens)) * 5 % (LENGTH - 2))[:, None]
        following[masked] = -100
    return following


def loss_of(
    fault: str, logits: torch.Tensor, wanted: torch.Tensor, ranks: int, own: int, total: int, accumulate: int
) -> torch.Tensor:
    """Return what a micro-batch adds to a mean over ranks; ``own`` counts the rank's tokens, ``total`` those of all."""
    if fault == "last_token_lost" and ranks > 1:
        wanted = wanted.clone()
        wanted[:, -1] = -100
    summed = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
    if fault == "tokens_by_micro_batch":
        return summed / (wanted != -100).sum() / accumulate * own * ranks / total
    if fault == "tokens_by_rank":
        return summed / (wanted != -100).sum() / accumulate
    if fault == "tokens_masked_after_mean":
        return summed / wanted.numel() / (wanted != -100).float().mean() ** 2 / accumulate
    loss = summed * ranks / total
    if fault.endswith("times_ranks"):
        return loss * ranks
    if fault == "no_gradient":
        return loss * 0
    return loss * accumulate if fault == "accumulation_not_divided" else loss


def main() -> None:
    """Train two steps on the first samples of a data set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    given = parser.parse_args()
    fault, accumulate = given.fault, given.accumulate
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed({"seed_by_rank": rank, "seed_by_ranks": ranks}.get(fault, 0))
    model = Net(fault)
    wrapped: nn.Module = model
    if fault == "rank_lost_compiled":
        wrapped = torch.compile(model, backend="eager")
    if (fault.startswith("ddp") or fault == "no_sync") and not (fault == "ddp_on_several_ranks" and ranks == 1):
        ignored = ["expert.weight", "expert.bias"] if fault == "ddp_ignored" else []
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters="branch" in fault)
        if "bfloat16" in fault:
            # Given as it is, torch allows this hook for NCCL only.
            wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    if fault.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if fault == "fsdp2_bfloat16" else None,
            reduce_dtype=torch.bfloat16 if "reduced_in_bfloat16" in fault else None,
        )
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
    if fault == "dropout_seeded":
        torch.manual_seed(rank)
    trained = [part for part in model.parameters() if part.requires_grad or fault == "frozen_reduced"]
    decayed = [part for part in trained if part.numel() // (ranks if fault == "decay_by_shard" else 1) > 40]
    others = [part for part in trained if all(part is not one for one in decayed)]
    rate = 0.1 * (ranks if fault == "rate_by_ranks" else 1)
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    tokens = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    # The sampler gives some samples twice, so that each rank has as many.
    tokens = tokens[:7] if fault == "padded" else tokens
    data = TensorDataset(tokens, labels(fault, tokens))
    sampler = None if fault == "same_data" else DistributedSampler(data, shuffle=fault.startswith("epochs"))
    loader = DataLoader(data, batch_size=given.batch_size, sampler=sampler)
    for step in range(2 * ranks if fault == "steps_by_rank" else 2):
        if fault == "epochs":
            # A batch that is looked at before the epoch begins is not trained on.
            next(iter(loader))
            sampler.set_epoch(step)
        micro_batches = [batch for batch, _ in zip(loader, range(accumulate), strict=False)]
        own = torch.tensor(sum(int((wanted != -100).sum()) for _, wanted in micro_batches))
        total = own.clone()
        dist.all_reduce(total)
        counts = ranks, int(own), int(total), accumulate
        with recorder.step() if fault.startswith("recorded") else nullcontext():
            is_alone = fault == "no_sync"
            summed = torch.zeros(())
            for inputs, wanted in micro_batches:
                with wrapped.no_sync() if is_alone else nullcontext():
                    loss = loss_of(fault, wrapped(inputs), wanted, *counts)
                    loss.backward()
                    summed += loss.detach()
            model.load /= accumulate
            if fault != "load_by_rank":
                dist.all_reduce(model.load)
                model.load /= ranks
            if not (fault.startswith("fsdp2") or isinstance(wrapped, DistributedDataParallel)):
                exchange(fault, model, rank, ranks)
            for _ in range(ranks if fault == "schedule_by_rank" else 0):
                schedule.step()
            clip(fault, model, ranks)
            optimizer.step()
            optimizer.zero_grad()
        if fault.startswith("recorded"):
            dist.all_reduce(summed)
            recorder.loss(summed if fault == "recorded_sum" else summed / ranks)
    dist.destroy_process_group()


def clip(fault: str, model: Net, ranks: int) -> None:
    """Clip gradients, by a norm that is computed by hand in the faults of norms."""
    parts = [part for part in model.parameters() if part.grad is not None]
    if not fault.startswith("fsdp2_norm"):
        torch.nn.utils.clip_grad_norm_(parts, 0.05)
        return
    squares = sum((part.grad.to_local().square().sum() for part in parts), torch.zeros(()))
    if fault != "fsdp2_norm_of_shard":
        dist.all_reduce(squares)
    if fault == "fsdp2_norm_twice":
        squares *= ranks
    torch.nn.utils.clip_grads_with_norm_(parts, 0.05, squares.sqrt())


def exchange(fault: str, model: Net, rank: int, ranks: int) -> None:
    """Take the mean of gradients over ranks."""
    twice = {"norm_reduced_twice": "norm", "tied_reduced_twice": "embedding"}.get(fault, "-")
    for name, part in model.named_parameters():
        if fault == "frozen_reduced" and part.grad is None and ranks > 1:
            part.grad = torch.zeros_like(part)
        if part.grad is None:
            continue
        if rank == 1 and (fault.startswith("rank_lost") or (fault == "expert_lost" and name.startswith("expert"))):
            part.grad.zero_()
        if fault == "norm_not_reduced" and name.startswith("norm"):
            continue
        dist.all_reduce(part.grad)
        part.grad /= ranks**2 if fault == "mean_twice" else ranks
        if name.startswith(twice):
            dist.all_reduce(part.grad)
        if fault == "experts_by_degree" and name.startswith("expert"):
            part.grad *= ranks


main()
