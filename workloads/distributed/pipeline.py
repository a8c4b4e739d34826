"""Pipeline parallelism: stages hold consecutive blocks, and micro-batches pass through them in turn.

The schedules are torch's, under torch's names. A step ends when all micro-batches are done.

- ``1F1B``, or PipeDream-Flush (arXiv 2006.09503, section 2.2; 2104.04473, section 2.2.1): once a stage has enough
  micro-batches in flight, each forward pass is followed by a backward pass.
- ``Interleaved1F1B`` (arXiv 2104.04473, section 2.2.2): a rank has two stages, and waits less at the ends of a step.
- ``ZBVZeroBubble`` (arXiv 2401.10241, section 6): the second stages are in the reverse order of ranks, and gradients of
  weights are computed later than those of activations, where a rank would wait.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from ..common.gradients import whole_norm
from ..config import LlamaSettings
from ..models import build_model
from ..models.common.decoder import Decoder
from .parallel_dims import ParallelMesh

_T = TypeVar("_T")
_1F1B, ZERO_BUBBLE = "1F1B", "ZBVZeroBubble"


def stage_layers(n_layers: int, num_stages: int, stage: int) -> range:
    """Divide the blocks evenly and return one stage's blocks; the last stage, with the output, never has more."""
    begin, end = (-(-number * n_layers // num_stages) for number in (stage, stage + 1))
    return range(begin, end)


def stages_of_rank(schedule: str, num_ranks: int, rank: int) -> tuple[int, ...]:
    """Return the numbers of the stages that a rank of the pipeline holds."""
    if schedule == _1F1B:
        return (rank,)
    return rank, 2 * num_ranks - 1 - rank if schedule == ZERO_BUBBLE else num_ranks + rank


def own_stages(schedule: str, pipeline: DeviceMesh | None) -> tuple[tuple[int, ...], int]:
    """Return the numbers of the stages that this rank holds, and the number of all stages; 1 without a pipeline."""
    if pipeline is None:
        return (0,), 1
    return stages_of_rank(schedule, pipeline.size(), pipeline.get_local_rank()), count_stages(schedule, pipeline.size())


def count_stages(schedule: str, num_ranks: int) -> int:
    """Return the number of stages of all ranks."""
    return num_ranks * len(stages_of_rank(schedule, num_ranks, 0))


def keep_stage(model: Decoder, num_stages: int, *stages: int) -> None:
    """Drop the modules of all but ``stages`` from ``model``, which is on the meta device; names stay the whole model's.

    The first stage then maps token ids to activations ``[batch, seq_len, dim]``, stages between map activations to
    activations, and the last stage maps activations to logits.
    """
    kept = {number for stage in stages for number in stage_layers(len(model.layers), num_stages, stage)}
    for number in range(len(model.layers)):
        if number not in kept:
            # ``del layers[number]`` would renumber the layers after it.
            delattr(model.layers, str(number))
    dropped = ["tok_embeddings"] if 0 not in stages else []
    dropped += ["norm", "output"] if num_stages - 1 not in stages else []
    for name in dropped:
        setattr(model, name, nn.Identity())


def split_stages(model: Decoder, num_stages: int, stages: Sequence[int]) -> list[Decoder]:
    """Return a model of each stage, made of the modules of ``model``, which holds all ``stages`` and nothing else."""
    if len(stages) == 1:
        return [model]
    models = []
    for stage in stages:
        with torch.device("meta"):
            own = build_model(model.config)
        keep_stage(own, num_stages, stage)
        for name, _ in own.layers.named_children():
            setattr(own.layers, name, model.layers.get_submodule(name))
        for name in ("tok_embeddings", "norm", "output"):
            if not isinstance(own.get_submodule(name), nn.Identity):
                setattr(own, name, model.get_submodule(name))
        models.append(own)
    return models


def _place(name: str) -> float:
    """Return the place, in the model's order, of the parameter ``name``; numbers of the optimizer come last."""
    outer, _, inner = name.partition(".")
    if outer == "layers":
        return int(inner.split(".")[0])
    if outer == "tok_embeddings":
        return -math.inf
    return math.inf if outer.startswith("group ") else sys.maxsize


class Stages:
    """Combines values of a pipeline's stages into values of the whole model; a single stage already has the values.

    Attributes:
        group: the ranks that hold the same stages as this rank; None means all ranks.
    """

    def __init__(self, mesh: ParallelMesh | None = None) -> None:
        """Make the stages' process groups; collective over the world."""
        self._pipeline = None if mesh is None else mesh.pipeline
        self.group: dist.ProcessGroup | None = None
        if self._pipeline is not None:
            self.group, _ = dist.new_subgroups(dist.get_world_size() // self._pipeline.size())

    def merged(self, own: dict[str, _T]) -> dict[str, _T]:
        """Merge the JSON values by name of all stages, in the model's order of registration; collective.

        torch's collectives of objects unpickle what they receive.
        """
        if self._pipeline is None:
            return own
        text, group, device = json.dumps(own), self._pipeline.get_group(), self._pipeline.device_type
        longest = torch.tensor(len(text), device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        padded = torch.tensor(list(text.ljust(int(longest)).encode()), dtype=torch.uint8, device=device)
        texts = padded.new_empty(self._pipeline.size() * len(padded))
        dist.all_gather_into_tensor(texts, padded, group=group)
        parts: list[dict[str, _T]] = [json.loads(bytes(each)) for each in texts.view(-1, len(padded)).tolist()]
        return dict(sorted((item for part in parts for item in part.items()), key=lambda item: _place(item[0])))

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Return the norm over all ranks' stages from that of each rank, with the same bits on each; collective.

        The norms are gathered, since a reduction does not add in the same order on every rank.
        """
        if self._pipeline is None:
            return own
        whole = whole_norm(own)
        norms = whole.new_empty(self._pipeline.size())
        dist.all_gather_into_tensor(norms, whole.reshape(1), group=self._pipeline.get_group())
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return norm


class Pipeline:
    """One rank's part of a step: every micro-batch's passes through its stages, and the reduction of gradients."""

    def __init__(
        self,
        models: Sequence[Decoder],
        mesh: ParallelMesh,
        settings: LlamaSettings,
        freqs_cis: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        reduce_every_micro_batch: bool,
    ) -> None:
        """Make the schedule.

        Args:
            models: the models of this rank's stages, in the order of :func:`stages_of_rank`.
            loss: a function that computes one micro-batch's part of the global loss.
            reduce_every_micro_batch: whether each backward pass reduces its gradients, or only the last of a step.
        """
        assert mesh.pipeline is not None
        self._device = freqs_cis.device
        schedule = settings.pipeline_parallel_schedule
        numbers, num_stages = own_stages(schedule, mesh.pipeline)
        self._is_first, self._is_last = 0 in numbers, num_stages - 1 in numbers
        tokens, between, logits = _passed(settings, freqs_cis.shape[-2], mesh.degrees.tensor_parallel)
        stages = []
        for number, model in zip(numbers, models, strict=True):
            # Rotations are the same for all micro-batches, and the schedule would split them as an argument.
            model.register_forward_pre_hook(lambda _, inputs: (*inputs, freqs_cis))
            stages.append(
                PipelineStage(
                    # Sequential hides FSDP2's module from torch's stage, which would postpone the reductions.
                    nn.Sequential(model) if reduce_every_micro_batch else model,
                    number,
                    num_stages,
                    self._device,
                    input_args=tokens if number == 0 else between,
                    output_args=logits if number == num_stages - 1 else between,
                    group=mesh.pipeline.get_group(),
                )
            )
        make: Any = get_schedule_class(schedule)
        self._schedule = make(
            stages[0] if schedule == _1F1B else stages,
            settings.gradient_accumulation,
            loss_fn=loss,
            # The loss is divided by the global batch's count already.
            scale_grads=False,
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``batch`` ``[micro-batch, inputs or labels, sequence, token]``; return this rank's loss.

        The loss is zero on all ranks but that of the last stage.
        """
        # Torch 2.11 also compares strides with the strides of the announced arguments.
        inputs, labels = (part.flatten(0, 1).contiguous() for part in batch.unbind(1))
        losses: list[torch.Tensor] = []
        given = (inputs,) if self._is_first else ()
        self._schedule.step(*given, target=labels if self._is_last else None, losses=losses, return_outputs=False)
        return sum((loss.detach() for loss in losses), start=torch.zeros((), device=self._device))


def _passed(settings: LlamaSettings, num_positions: int, tensor_parallel: int) -> tuple[torch.Tensor, ...]:
    """Return the input of the first stage, what stages pass on, and the output of the last stage, on the meta device.

    Activations have the dtype of gathered parameters, and tensor parallelism splits them along the sequence.
    """
    tokens = (settings.batch_size, num_positions)
    split = (settings.batch_size, num_positions // tensor_parallel, settings.model.dim)
    between = torch.empty(split, dtype=settings.param_dtype, device="meta", requires_grad=True)
    logits = between.new_empty((*tokens, settings.model.vocab_size), requires_grad=True)
    return torch.empty(tokens, dtype=torch.int64, device="meta"), between, logits
