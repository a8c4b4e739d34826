"""Numbers of a first step, for a comparison with the same samples in another arrangement of ranks and batches.

A script or a workload is observed beside what records its steps. Each rank keeps its own parts, with their places in
the logical tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from pytest_aorta.common.clock import time
from pytest_aorta.result import first_step as kept
from pytest_aorta.result.folder import FIRST_STEP_FILE
from pytest_aorta.worker.collectives import reduced_types
from pytest_aorta.worker.finite import Optimizers, roots, untraced
from pytest_aorta.worker.layout import is_dtensor, layout_of, local_grids, local_part
from pytest_aorta.worker.replacing import replace
from pytest_aorta.worker.torch_private import BaseDataLoaderIter, FakeTensor, makes_state_alone
from pytest_aorta.worker.training import hashed_samples, parts_of_samples, random_state, tensors_in
from pytest_aorta.worker.weight_hash import logical_name

# The random numbers of the CPU and of this rank's device.
_GENERATORS = "", "CUDA"
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


class FirstStep:
    """The samples and losses of the first step, the gradients before clipping, and the weights around the step."""

    def __init__(self, num_joined: int) -> None:
        """Observe from now on, and join as many batches of each loader into one."""
        self._num_joined = num_joined
        self._parts: dict[str, np.ndarray[Any, Any]] = {}
        self._optimizers = Optimizers()
        # Ids of the optimizers whose first step has begun, and has ended.
        self._begun, self._ended = set[int](), set[int]()
        # Gradients, and the norms that they are clipped by, by id of the parameter.
        self._gradients: dict[int, torch.Tensor] = {}
        self._norms: dict[int, float] = {}
        # By the id of a parameter: itself, its module and name there, and what this rank adds to its gradient, folded.
        self._own: dict[int, tuple[torch.Tensor, torch.nn.Module, str, np.ndarray[Any, Any]]] = {}
        self._losses: list[torch.Tensor] = []
        # When the first backward pass began.
        self._began_ns = 0
        self._num_steps = 0
        self._samples: dict[str, list[str]] = {kind: [] for kind in kept.SAMPLES}
        # The module that was called first of those that run.
        self._outermost: torch.nn.Module | None = None
        self._is_in_backward = False
        # The state of random numbers before the forward pass that runs, and before the first one.
        self._random = self._first_random = ""
        # Of iterators by id, and of that which was drawn from last: the sampler's id with its epoch, and a mark.
        self._iterators: dict[int, tuple[tuple[int, int], object]] = {}
        self._drawn: tuple[tuple[int, int], object] | None = None
        # The mark of the iterator whose batches were trained on, by the sampler's id with its epoch.
        self._trained: dict[tuple[int, int], object] = {}
        self._traits = set[str]()
        self._eps = 0.0
        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(untraced(self._begin_step))
        register_optimizer_step_post_hook(untraced(self._end_step))
        for owner, name, around in (
            (torch.autograd, "backward", self._backward),
            (torch.nn.utils, "clip_grad_norm_", self._clip),
            (torch.nn.utils.clip_grad, "clip_grad_norm_", self._clip),
            (torch.nn.utils, "clip_grads_with_norm_", self._clip),
            (BaseDataLoaderIter, "__init__", self._begin_epoch),
            (BaseDataLoaderIter, "__next__", self._draw),
        ):
            replace(owner, name, around)

    @property
    def _has_ended(self) -> bool:
        return bool(self._ended)

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling() or self._has_ended or self._is_in_backward or not torch.is_grad_enabled():
            return
        if self._outermost is None:
            self._outermost, self._random = module, random_state(*_GENERATORS)
            self._first_random = self._first_random or self._random
            # What has a gradient was computed by another module; labels may follow.
            self._note_samples(kept.GIVEN, [part for part in tensors_in(inputs) if not part.requires_grad][:1])

    def _leave(self, module: torch.nn.Module, _inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or self._has_ended:
            return
        # Modules of FSDP2 have whole parameters here.
        for name, part in module.named_parameters(recurse=False):
            if part.requires_grad and not is_dtensor(part) and id(part) not in self._own:
                self._own[id(part)] = part, module, name, (folds := np.zeros(kept.FOLDS))
                part.register_hook(untraced(partial(self._add_own, folds)))
        if isinstance(module, _BATCH_NORMS) and module.training:
            self._traits.add(kept.BATCH_NORM)
        kinds = {part.dtype for part in tensors_in(output) if part.is_floating_point()}
        self._eps = max([self._eps, *(torch.finfo(kind).eps for kind in kinds)])
        if module is self._outermost:
            self._outermost = None
            if self._random != random_state(*_GENERATORS):
                self._traits.add(kept.RANDOM)

    def _add_own(self, folds: np.ndarray[Any, Any], gradient: torch.Tensor) -> None:
        """Add what a backward pass of this rank adds to a gradient, before ranks reduce it."""
        if not self._has_ended:
            folds += kept.folded(gradient.detach().double().cpu().numpy())

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        # A pipeline may try its shapes first.
        if not (self._has_ended or self._is_in_backward or isinstance(loss, FakeTensor)):
            self._began_ns = self._began_ns or time.time_ns()
            self._losses.append(loss.detach().double().sum())
        was_in_backward, self._is_in_backward = self._is_in_backward, True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._is_in_backward = was_in_backward

    def _begin_epoch(self, original: Callable[..., Any], iterator: object, loader: Any) -> None:
        sampler = loader.sampler
        self._iterators.pop(id(iterator), None)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            self._iterators[id(iterator)] = (id(sampler), sampler.epoch), object()
        original(iterator, loader)

    def _draw(self, original: Callable[..., Any], iterator: object) -> Any:
        self._drawn = self._iterators.get(id(iterator))
        batch = _joined([original(iterator) for _ in range(self._num_joined)])
        if not self._has_ended:
            self._note_samples(kept.DRAWN, tensors_in(batch))
        return batch

    def _note_samples(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        # Hashed now, since a loader may use the memory again.
        parts = parts_of_samples(tensors)
        self._samples[kind] += hashed_samples(parts)
        if kind == kept.GIVEN:
            integers = [part for part in parts if not (part.is_floating_point() or part.is_complex())]
            self._samples[kept.INTEGERS] += [str(value) for part in integers for value in part.flatten().tolist()]

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # Parameters may come as an iterator, which has one reader.
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        self._keep_gradients(clipped)
        result = original(clipped, *args, **kwargs)
        norm = kwargs.get("total_norm", args[1] if len(args) > 1 else None) if result is None else result
        is_plain = result is None or kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0) == 2.0
        if not self._has_ended and isinstance(norm, torch.Tensor) and is_plain:
            # All ranks of its mesh are here.
            value = float(norm.full_tensor() if is_dtensor(norm) else norm)
            self._norms |= {id(part): value for part in clipped}
        return result

    def _keep_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the gradients that are not kept yet: before they are clipped, else before the optimizer's step."""
        for part in parameters:
            if part.grad is not None:
                self._gradients.setdefault(id(part), part.grad.detach().clone())

    def _begin_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if id(optimizer) in self._begun or makes_state_alone(optimizer):
            return
        self._begun.add(id(optimizer))
        self._optimizers.add(optimizer)
        reduced = (torch.finfo(getattr(torch, kind)) for kind in reduced_types(self._began_ns))
        self._eps = max([self._eps, *(kind.eps for kind in reduced)])
        inside = _roots()
        paths = {id(module): path for root in inside for path, module in root.named_modules()}
        for _, module, name, folds in self._own.values():
            if (path := paths.get(id(module))) is not None:
                self._keep(kept.OWN, f"{path}.{name}".lstrip("."), folds)
        named = self._optimizers.named(optimizer, inside=inside)
        self._keep_gradients(part for _, part in named)
        rates = {id(part): group.get("lr", 0) for group in optimizer.param_groups for part in group["params"]}
        for name, part in named:
            self._add(kept.BEFORE, name, part, part)
            self._keep(kept.RATE, name, float(rates[id(part)]))
            if (gradient := self._gradients.get(id(part))) is not None:
                self._add(kept.GRADIENT, name, gradient, part)
                if id(part) in self._norms:
                    self._keep(kept.NORM, name, self._norms[id(part)])

    def _end_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if id(optimizer) not in self._begun:
            return
        self._num_steps += 1
        # A batch that is only looked at begins no epoch.
        if self._drawn and self._trained.setdefault(*self._drawn) is not self._drawn[1]:
            self._traits.add(kept.SAME_EPOCHS)
        if id(optimizer) in self._ended:
            return
        self._ended.add(id(optimizer))
        for name, part in self._optimizers.named(optimizer):
            self._add(kept.AFTER, name, part, part)
        for name, part in (pair for root in _roots() for pair in root.named_buffers()):
            if part.is_floating_point() and not part.is_meta:
                self._add(kept.BUFFER, name, part, part)

    def _add(self, kind: str, name: str, tensor: torch.Tensor, placed: torch.Tensor) -> None:
        """Add this rank's part of a tensor, which lies as ``placed`` does."""
        own = local_part(tensor.detach()).cpu()
        # NumPy has no bfloat16.
        own = own.float() if own.is_floating_point() and own.element_size() < 4 else own
        self._keep(kind, name, own.flatten().numpy().copy())
        self._keep(kept.SHAPE, name, placed.shape)
        if is_dtensor(placed) and layout_of(placed):
            fitting = [grid for grid in local_grids(name, placed) if grid.numel == own.numel()]
            self._keep(kept.INDEX, name, fitting[0].flat_index(0, own.numel(), own.device))

    def _keep(self, kind: str, name: str, value: Any) -> None:
        self._parts[kept.key(kind, logical_name(name))] = np.asarray(value)

    def write(self, folder: Path) -> None:
        """Write what was kept as NumPy's arrays into the folder of the rank."""
        arrays: dict[str, Any] = {
            **{kind: np.array(found, dtype="S16") for kind, found in self._samples.items()},
            kept.TRAITS: np.array([*self._traits], dtype="S16"),
            kept.LOSS: np.array([float(loss) for loss in self._losses]),
            kept.STATE: np.array(self._first_random),
            kept.EPS: np.array(self._eps),
            kept.STEPS: np.array(self._num_steps),
        }
        with (folder / FIRST_STEP_FILE).open("wb") as file:
            np.savez(file, **{**arrays, **self._parts})


def _joined(batches: Sequence[Any]) -> Any:
    """Return batches as one that has the samples of all."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([*batches]) if first.dim() else first
    if isinstance(first, Mapping):
        return type(first)({key: _joined([batch[key] for batch in batches]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        parts = [_joined(parts) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def _roots() -> list[torch.nn.Module]:
    """Return the modules that are in no other but DDP's, which a script may use on several ranks only."""
    return [root.module if isinstance(root, DistributedDataParallel) else root for root in roots()]
