"""Pipeline parallelism: stages hold consecutive blocks, and micro-batches pass through them in turn.

The schedule is PipeDream-Flush, or 1F1B (arXiv 2006.09503, section 2.2; 2104.04473, section 2.2.1): once a stage has
enough micro-batches in flight, each forward pass is followed by a backward pass. A step ends when all micro-batches are
done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ...common.gradients import whole_norm
from ..model.decoder import Llama
from ..settings import LlamaSettings
from .mesh import ParallelMesh

_T = TypeVar("_T")
_BOUNDARIES = ("forward", "backward")


def stage_layers(n_layers: int, num_stages: int, stage: int) -> range:
    """Divide the blocks evenly and return one stage's blocks; the last stage, with the output, never has more."""
    begin, end = (-(-number * n_layers // num_stages) for number in (stage, stage + 1))
    return range(begin, end)


def check_pipeline(degree: int, settings: LlamaSettings) -> None:
    """Raise ValueError if a key contradicts ``degree`` stages; the message names the key."""
    if degree == 1:
        return
    asked = f"pipeline_parallel_degree is {degree}"
    if degree > settings.model.n_layers:
        raise ValueError(f"{asked} and n_layers is {settings.model.n_layers}: each stage holds at least one block")
    if (micro_batches := settings.gradient_accumulation) < degree:
        raise ValueError(
            f"{asked} and gradient_accumulation is {micro_batches}: 1F1B takes at least as many micro-batches as stages"
        )
    if boundaries := [kind for kind in settings.hashing.hash_tensors if kind in _BOUNDARIES]:
        raise ValueError(
            f"{asked} and hash_tensors has {boundaries}: the schedule runs forward and backward passes of several "
            f"micro-batches in turn, and a boundary is attributed to the pass that runs; allowed are the other kinds"
        )
    if settings.fault.kind == "drop_gradient":
        raise ValueError(
            f"{asked} and fault is 'drop_gradient', which drops a rank's gradients at its loss, and only the last "
            f"stage has a loss; allowed are the other kinds"
        )


def keep_stage(model: Llama, num_stages: int, stage: int) -> None:
    """Drop the modules of other stages from ``model``, which is on the meta device; names stay the whole model's.

    The first stage then maps token ids to activations ``[batch, seq_len, dim]``, stages between map activations to
    activations, and the last stage maps activations to logits.
    """
    kept = stage_layers(len(model.layers), num_stages, stage)
    for number in range(len(model.layers)):
        if number not in kept:
            # ``del layers[number]`` would renumber the layers after it.
            delattr(model.layers, str(number))
    dropped = ["tok_embeddings"] if stage > 0 else []
    dropped += ["norm", "output"] if stage < num_stages - 1 else []
    for name in dropped:
        setattr(model, name, nn.Identity())


class Stages:
    """Combines values of a pipeline's stages into values of the whole model; a single stage already has the values.

    Attributes:
        group: the ranks of this rank's stage; None means all ranks.
    """

    def __init__(self, mesh: ParallelMesh | None = None) -> None:
        """Make the stages' process groups; collective over the world."""
        self._pipeline = None if mesh is None else mesh.pipeline
        self.group: dist.ProcessGroup | None = None
        if self._pipeline is not None:
            self.group, _ = dist.new_subgroups(dist.get_world_size() // self._pipeline.size())

    def concatenated(self, own: list[_T]) -> list[_T]:
        """Concatenate the lists of all stages, in the model's order of registration; collective."""
        if self._pipeline is None:
            return own
        parts: list[list[_T]] = [[] for _ in range(self._pipeline.size())]
        dist.all_gather_object(parts, own, group=self._pipeline.get_group())
        return [item for part in parts for item in part]

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Return the norm over all stages from the norm of each, with the same bits on every rank; collective.

        The norms are gathered, since a reduction does not add in the same order on every rank.
        """
        if self._pipeline is None:
            return own
        whole = whole_norm(own)
        norms = whole.new_empty(self._pipeline.size())
        dist.all_gather_into_tensor(norms, whole.reshape(1), group=self._pipeline.get_group())
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return norm


class _ReducedAtOnce(nn.Module):
    """A wrapper that hides FSDP2's module from torch's stage, which would postpone the reduction of gradients."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self._model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        out: torch.Tensor = self._model(inputs)
        return out


class Pipeline:
    """One stage's part of a step: every micro-batch's forward and backward pass, and the reduction of gradients."""

    def __init__(
        self,
        model: Llama,
        mesh: ParallelMesh,
        settings: LlamaSettings,
        rotations: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        reduce_every_micro_batch: bool,
    ) -> None:
        """Make the schedule.

        Args:
            loss: a function that computes one micro-batch's part of the global loss.
            reduce_every_micro_batch: whether each backward pass reduces its gradients, or only the last of a step.
        """
        assert mesh.pipeline is not None
        # Activations have the dtype of gathered parameters.
        dtype = settings.param_dtype
        self._device = rotations.device
        # Rotations are the same for all micro-batches, and the schedule would split them as an argument.
        model.register_forward_pre_hook(lambda _, inputs: (*inputs, rotations))
        stage, num_stages = mesh.pipeline.get_local_rank(), mesh.pipeline.size()
        self._is_first, self._is_last = stage == 0, stage == num_stages - 1
        num_positions = rotations.shape[-2]
        tokens = (settings.batch_size, num_positions)
        # Between blocks, tensor parallelism splits activations along the sequence.
        split = (settings.batch_size, num_positions // mesh.degrees.tensor_parallel, settings.model.dim)
        between = torch.empty(split, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty((*tokens, settings.model.vocab_size), dtype=dtype, device="meta", requires_grad=True)
        self._schedule = Schedule1F1B(
            PipelineStage(
                _ReducedAtOnce(model) if reduce_every_micro_batch else model,
                stage,
                num_stages,
                self._device,
                input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if self._is_first else between,
                output_args=logits if self._is_last else between,
                group=mesh.pipeline.get_group(),
            ),
            settings.gradient_accumulation,
            loss_fn=loss,
            # The loss is divided by the global batch's count already.
            scale_grads=False,
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``batch`` ``[micro-batch, inputs or labels, sequence, token]``; return this rank's loss.

        The loss is zero on all stages but the last.
        """
        # Torch 2.11 also compares strides with the strides of the announced arguments.
        inputs, labels = (part.flatten(0, 1).contiguous() for part in batch.unbind(1))
        losses: list[torch.Tensor] = []
        given = (inputs,) if self._is_first else ()
        self._schedule.step(*given, target=labels if self._is_last else None, losses=losses, return_outputs=False)
        total = torch.zeros((), device=self._device)
        for loss in losses:
            total += loss.detach()
        return total
