"""Hashes of module boundaries on each rank: inputs and outputs of modules, and gradients of outputs.

A hook calls an operator that hashes its arguments and returns a copy of the first; the operator's gradient does the
same. A compiler treats the operator like any other, so the operator stays between the modules in a full graph too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from pytest_aorta.worker import TensorHashes, hash_local

FORWARD, BACKWARD = "forward", "backward"
# An operator takes only tensors and plain values, so a number stands for the object.
_ALIVE: WeakValueDictionary[int, Boundaries] = WeakValueDictionary()
_NUMBERS = count()


@dataclass
class _Seen:
    """Hashes of one step's boundaries, in order of use; the model's current call began at index ``begun``."""

    names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    begun: int = 0

    def insert(self, index: int, name: str, tensor: torch.Tensor) -> None:
        self.names.insert(index, name)
        self.shapes.insert(index, list(tensor.shape))
        self.hashes.insert(index, hash_local("", tensor))

    def first_within(self, module: str) -> int:
        """Return the index of the first boundary within ``module``, or the end if there is none."""
        inside = f"{module}." if module else ""
        indices = range(self.begun, len(self.names))
        return next((index for index in indices if self.names[index].startswith(inside)), len(self.names))


class Boundaries:
    """Hashes each module's first argument and its output, and the output's gradient, as this rank holds them.

    Boundaries are named ``<module>:input`` and ``<module>:output``, followed by ``#2`` and so on for further calls of
    the module in the same step, e.g. by further micro-batches; the root's name is empty. Recomputation by activation
    checkpointing is left out. Hooks must be registered before the model first runs, since compiling traces them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._number = next(_NUMBERS)
        _ALIVE[self._number] = self
        self._phase: str | None = None
        self._seen: dict[str, _Seen] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._model = model
        for name, module in model.named_modules():
            # A compiled graph ends before the root's hooks run.
            if module is not model:
                module.register_forward_hook(_hook(self._number, name))

    def begin(self) -> None:
        """Start a hashed step; in other steps the operators only copy."""
        self._seen = {FORWARD: _Seen(), BACKWARD: _Seen()}
        self._calls.clear()
        self._phase = BACKWARD

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        is_seen = self._phase is not None
        if is_seen:
            self._phase, self._seen[FORWARD].begun = FORWARD, len(self._seen[FORWARD].names)
        output = _hook(self._number, "")(self._model, args, self._model(*args))
        self._phase = BACKWARD if is_seen else None
        return output

    def end(self, step: int) -> dict[str, TensorHashes]:
        """End the step and return the hashes of ``forward`` and of ``backward``."""
        self._phase = None
        return {
            phase: TensorHashes(seen.names, seen.shapes, {str(step): seen.hashes}) for phase, seen in self._seen.items()
        }

    def see(self, phase: str, module: str, part: str, tensor: torch.Tensor, given: torch.Tensor | None) -> None:
        """Hash one boundary, if its step is hashed and its phase is running."""
        if phase != self._phase:
            return
        seen, name = self._seen[phase], f"{module}:{part}"
        self._calls[phase, name] += 1
        call = f" #{number}" if (number := self._calls[phase, name]) > 1 else ""
        if given is not None:
            # A module receives its input before it calls its children, but its hook runs after theirs.
            seen.insert(seen.first_within(module), f"{module}:input{call}", given)
        seen.insert(len(seen.names), name + call, tensor)


def _hook(number: int, module: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if isinstance(output, torch.Tensor):
            return observe(output, _beside(output, given), number, module, "output", FORWARD)
        if isinstance(output, tuple):
            return tuple(
                observe(part, _beside(part, None if index else given), number, module, f"output[{index}]", FORWARD)
                if isinstance(part, torch.Tensor)
                else part
                for index, part in enumerate(output)
            )
        return output

    return hook


def _beside(output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """Return a module's argument, detached, in a form that an operator takes together with the module's output.

    If other modules read the argument too, passing a copy of it to this module would change the order in which
    gradients are added up, and thus their bits. PyTorch's own full backward hooks pass a copy.
    """
    if given is None:
        return None
    kept = given.detach()
    local = kept.to_local() if isinstance(kept, DTensor) else kept
    if not isinstance(output, DTensor):
        return local
    return DTensor.from_local(local, output.device_mesh, [Replicate()] * output.device_mesh.ndim, run_check=False)


@torch.library.custom_op("aorta::observe", mutates_args=())
def observe(
    tensor: torch.Tensor, given: torch.Tensor | None, number: int, module: str, part: str, phase: str
) -> torch.Tensor:
    """Hash ``tensor`` and ``given``, a module's argument, for boundaries ``number``; return a copy of ``tensor``."""
    if number in _ALIVE:
        _ALIVE[number].see(phase, module, part, tensor, given)
    return tensor.clone()


@observe.register_fake
def _(
    tensor: torch.Tensor, given: torch.Tensor | None, number: int, module: str, part: str, phase: str
) -> torch.Tensor:
    del given, number, module, part, phase
    return torch.empty_like(tensor)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.boundary = inputs[2:5]


def _see_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
    return observe(gradient, None, *ctx.boundary, BACKWARD), None, None, None, None, None


observe.register_autograd(_see_gradient, setup_context=_remember)


@register_sharding(torch.ops.aorta.observe.default)  # type: ignore[untyped-decorator]
def _keep_placement(tensor: Any, given: Any, *others: Any) -> list[tuple[list[Any], list[Any]]]:
    """Let each rank hash its own part of a DTensor, for every placement."""
    placements = [Replicate(), Partial("sum"), *(Shard(dim) for dim in range(tensor.ndim))]
    beside = [None if given is None else Replicate(), *(None for _ in others)]
    return [([placement], [placement, *beside]) for placement in placements]
