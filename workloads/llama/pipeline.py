"""Pipeline parallelism: stages hold consecutive blocks, and micro-batches pass through them in turn.

The schedule is PipeDream-Flush, or 1F1B (arXiv 2006.09503, section 2.2; 2104.04473, section 2.2.1): once a stage has
micro-batches enough under way, a backward pass follows each forward pass, and a step ends with all of them done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .gradients import whole_norm
from .mesh import ParallelMesh
from .model import Llama

_T = TypeVar("_T")
_BOUNDARIES = ("forward", "backward")


def stage_layers(n_layers: int, num_stages: int, stage: int) -> range:
    """The blocks of a stage, as evenly as can be; the last stage, which has the output too, never has more."""
    begin, end = (-(-number * n_layers // num_stages) for number in (stage, stage + 1))
    return range(begin, end)


def check_pipeline(degree: int, config: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that do not go with so many stages, by their names."""
    if degree == 1:
        return
    asked = f"pipeline_parallel_degree is {degree}"
    if degree > config["n_layers"]:
        raise ValueError(f"{asked} and n_layers is {config['n_layers']}: each stage holds at least one block")
    if (micro_batches := config["gradient_accumulation"]) < degree:
        raise ValueError(
            f"{asked} and gradient_accumulation is {micro_batches}: these are the micro-batches that pass through the "
            f"stages, and 1F1B takes at least as many as there are stages"
        )
    if config.get("reduce_every_micro_batch"):
        raise ValueError(
            f"{asked} and reduce_every_micro_batch is true: torch's schedule reduces after the last backward pass of "
            f"a step; allowed is false"
        )
    if boundaries := [kind for kind in config["hash_tensors"] if kind in _BOUNDARIES]:
        raise ValueError(
            f"{asked} and hash_tensors has {boundaries}: the schedule runs forward and backward passes of several "
            f"micro-batches in turn, and boundaries are told apart by which of the two runs; allowed are the others"
        )
    if config["fault"].get("kind") == "drop_gradient":
        raise ValueError(
            f"{asked} and fault is 'drop_gradient', which drops a rank's gradients where its loss is, and only the "
            f"last stage has one; allowed are the other kinds"
        )


def keep_stage(model: Llama, num_stages: int, stage: int) -> None:
    """Drop the modules of other stages from ``model``, which is on the meta device; names stay the whole model's.

    It then maps token ids to ``[batch, seq_len, dim]`` on the first stage, these to logits on the last, and these to
    these between.
    """
    kept = stage_layers(len(model.layers), num_stages, stage)
    for number in range(len(model.layers)):
        if number not in kept:
            # ``del layers[number]`` would number those behind it anew.
            delattr(model.layers, str(number))
    dropped = ["tok_embeddings"] if stage > 0 else []
    dropped += ["norm", "output"] if stage < num_stages - 1 else []
    for name in dropped:
        setattr(model, name, nn.Identity())


class Stages:
    """What is of the whole model, put together from its stages; where there is one stage, what that one has.

    Attributes:
        group: the ranks of this rank's stage; None is all of them.
    """

    def __init__(self, mesh: ParallelMesh | None = None) -> None:
        """Make the stages' process groups; collective over the world."""
        self._pipeline = None if mesh is None else mesh.pipeline
        self.group: dist.ProcessGroup | None = None
        if self._pipeline is not None:
            self.group, _ = dist.new_subgroups(dist.get_world_size() // self._pipeline.size())

    def concatenated(self, own: list[_T]) -> list[_T]:
        """The lists of all stages, first stage first, which is the model's order of registration; collective."""
        if self._pipeline is None:
            return own
        parts: list[list[_T]] = [[] for _ in range(self._pipeline.size())]
        dist.all_gather_object(parts, own, group=self._pipeline.get_group())
        return [item for part in parts for item in part]

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """The norm over all stages from that of each, with the same bits on every rank; collective.

        They are gathered, since the order in which a reduction adds is not the same everywhere.
        """
        if self._pipeline is None:
            return own
        whole = whole_norm(own)
        norms = whole.new_empty(self._pipeline.size())
        dist.all_gather_into_tensor(norms, whole.reshape(1), group=self._pipeline.get_group())
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return norm


class Pipeline:
    """One stage's part of a step: every micro-batch's forward and backward pass, and the reduction of gradients."""

    def __init__(
        self,
        model: Llama,
        mesh: ParallelMesh,
        config: Mapping[str, Any],
        rotations: torch.Tensor,
        dtype: torch.dtype,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Make the schedule; ``dtype`` is that of activations, and ``loss`` a micro-batch's part of the global one."""
        assert mesh.pipeline is not None
        self._device = rotations.device
        # Rotations are the same for all micro-batches; what the schedule is given it splits.
        model.register_forward_pre_hook(lambda _, inputs: (*inputs, rotations))
        stage, num_stages = mesh.pipeline.get_local_rank(), mesh.pipeline.size()
        self._is_first, self._is_last = stage == 0, stage == num_stages - 1
        num_positions = rotations.shape[1]
        tokens = (config["batch_size"], num_positions)
        # Between blocks, tensor parallelism splits activations along the sequence.
        split = (config["batch_size"], num_positions // mesh.degrees.tensor_parallel, config["dim"])
        between = torch.empty(split, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty((*tokens, config["vocab_size"]), dtype=dtype, device="meta", requires_grad=True)
        self._schedule = Schedule1F1B(
            PipelineStage(
                model,
                stage,
                num_stages,
                self._device,
                input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if self._is_first else between,
                output_args=logits if self._is_last else between,
                group=mesh.pipeline.get_group(),
            ),
            config["gradient_accumulation"],
            loss_fn=loss,
            # The loss has the global batch's count in it.
            scale_grads=False,
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``[micro-batch, inputs or labels, sequence, token]``, and return this rank's loss.

        It is zero on all stages but the last.
        """
        # Torch 2.11 compares strides too with what was announced.
        inputs, labels = (part.flatten(0, 1).contiguous() for part in batch.unbind(1))
        losses: list[torch.Tensor] = []
        given = (inputs,) if self._is_first else ()
        self._schedule.step(*given, target=labels if self._is_last else None, losses=losses, return_outputs=False)
        total = torch.zeros((), device=self._device)
        for loss in losses:
            total += loss.detach()
        return total
