"""Numbers of a script's first step for a comparison with the same samples in another arrangement of ranks and batches.

Nothing here is collective: each rank keeps its own parts, with their places in the logical tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pytest_aorta.result.first_step import (
    AFTER,
    BATCH_NORM,
    BEFORE,
    EPS,
    GIVEN,
    GRADIENT,
    INDEX,
    LOSS,
    RANDOM,
    SAMPLES,
    SHAPE,
    TRAITS,
    key,
)
from pytest_aorta.result.folder import FIRST_STEP_FILE
from pytest_aorta.worker.layout import is_dtensor, layout_of, local_grids, local_part
from pytest_aorta.worker.training import hashed_samples, parts_of_samples, tensors_in
from pytest_aorta.worker.weight_hash import logical_name


class FirstStep:
    """The gradients of each parameter's first step before clipping, its weights around the step, and its samples."""

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray[Any, Any]] = {}
        # Gradients by id of the parameter, since clipping names none.
        self._gradients: dict[int, torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []
        self._samples: dict[str, list[str]] = {kind: [] for kind in SAMPLES}
        # Whether the outermost module was called since the last backward pass.
        self._is_in_forward = False
        self._random = b""
        self._traits = set[str]()
        self._eps = 0.0
        self._has_ended = False
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]

    def _enter(self, _module: torch.nn.Module, inputs: object) -> None:
        if not self._is_in_forward and torch.is_grad_enabled():
            self._is_in_forward, self._random = True, _random_state()
            self.note_samples(GIVEN, inputs)

    def _leave(self, module: torch.nn.Module, _inputs: object, output: object) -> None:
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm) and module.training:
            self._traits.add(BATCH_NORM)
        kinds = {part.dtype for part in tensors_in(output) if part.is_floating_point()}
        self._eps = max([self._eps, *(torch.finfo(kind).eps for kind in kinds)])

    def note_backward(self, loss: object) -> None:
        """Note the end of a forward pass, and what it has computed."""
        if self._has_ended:
            return
        if self._is_in_forward and self._random != _random_state():
            self._traits.add(RANDOM)
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().double().sum())
        self._is_in_forward = False

    def note_samples(self, kind: str, batch: object) -> None:
        """Hash the samples of a batch now, since a loader may use its memory again."""
        if not self._has_ended:
            self._samples[kind] += hashed_samples(parts_of_samples(tensors_in(batch)))

    def keep_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the gradients that are not kept yet: before they are clipped, else before the optimizer's step."""
        for part in parameters:
            if part.grad is not None:
                self._gradients.setdefault(id(part), part.grad.detach().clone())

    def begin(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep the parameters and gradients of an optimizer before its first step."""
        named = list(named)
        self.keep_gradients(part for _, part in named)
        for name, part in named:
            if (gradient := self._gradients.pop(id(part), None)) is not None:
                self._add(GRADIENT, name, gradient)
            self._add(BEFORE, name, part)

    def end(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep the parameters of an optimizer after its first step; samples of later passes are of other steps."""
        for name, part in named:
            self._add(AFTER, name, part)
        self._has_ended = True
        while self._hooks:
            self._hooks.pop().remove()

    def _add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        name = logical_name(name)
        own = local_part(tensor.detach()).cpu()
        # NumPy has no bfloat16.
        own = own.float() if own.is_floating_point() and own.element_size() < 4 else own
        self._parts[key(kind, name)] = own.flatten().numpy().copy()
        self._parts[key(SHAPE, name)] = np.array(tensor.shape, dtype=np.int64)
        if is_dtensor(tensor) and layout_of(tensor):
            fitting = [grid for grid in local_grids(name, tensor) if grid.numel == own.numel()]
            self._parts[key(INDEX, name)] = fitting[0].flat_index(0, own.numel(), torch.device("cpu")).numpy()

    def write(self, folder: Path) -> None:
        """Write what was kept as NumPy's arrays into the folder of the rank."""
        arrays: dict[str, Any] = {
            **{kind: np.array(found, dtype="S16") for kind, found in self._samples.items()},
            TRAITS: np.array([*self._traits], dtype="S16"),
            LOSS: np.array([float(loss) for loss in self._losses]),
            EPS: np.array(self._eps),
        }
        with (folder / FIRST_STEP_FILE).open("wb") as file:
            np.savez(file, **{**arrays, **self._parts})


def _random_state() -> bytes:
    """Return the state of the random numbers of the CPU and of this rank's device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return b"".join(state.numpy().tobytes() for state in states)
