"""Settings that an optimizer's steps train with: hyperparameters, batches and modes, noted where they change.

Nothing here waits for a device: samples are copied there, and read when the script has ended.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import operator
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from pytest_aorta.common.text import some_of
from pytest_aorta.result.series import BATCH, GRADIENTS, NOTED_STEPS, OFF, RANDOM, Series, Setting, digest
from pytest_aorta.worker.layout import NamedTensor
from pytest_aorta.worker.weight_hash import logical_name

# Keys of a parameter group that are no hyperparameters of its own, or follow from others.
_NOT_SHOWN = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_NOT_SHOWN |= {"decoupled_weight_decay"}
_VALUES = (bool, int, float, str)
_NUMBERS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_LONGEST_VALUE = 200
_DEEPEST = 8
_MOST_GROUPS = 16
# Samples are hashed of the first steps and of some later ones; of more steps if they are small.
_SAMPLED, _SMALL_BYTES = 4, 1 << 16
_MOST_SAMPLES = 1024
# Key in the state of a gradient scaler -> the setting's name.
_OF_SCALER = {"scale": "the gradient scale", "_growth_tracker": "the steps since the gradient scale grew"}


@dataclass
class Inputs:
    """Inputs of the step that runs: all that a script has done since the last step of an optimizer.

    Attributes:
        batches: What each loader returned last, by its identity, with what keeps that from another loader.
        num_backward: Number of backward passes.
        autocast: The type of the last autocast.
        clipped_to: The norm that gradients were clipped to; None if they were not.
        scaler: The gradient scaler of the loss; None without one.
        given: The tensors that a module was given first, where they are watched; a loader may be ahead of the step.
    """

    batches: dict[int, tuple[object, object]] = field(default_factory=dict)
    num_backward: int = 0
    autocast: str = OFF
    clipped_to: float | None = None
    scaler: torch.amp.GradScaler | None = None
    given: Sequence[torch.Tensor] = ()


def _mode(models: Iterable[torch.nn.Module]) -> str:
    """Return the mode of models, with the children in another one, such as below a wrapper in training."""
    models = [*models]
    if not all(model.training for model in models):
        return "eval"
    names = [name for model in models for name, child in model.named_children() if not child.training]
    return f"train, {some_of(names)} in eval" if names else "train"


class Training:
    """Settings of one optimizer's steps, from its first one on."""

    def __init__(
        self, named: Callable[[Optimizer], Iterable[NamedTensor]], made: str = "", most_every: int = 0
    ) -> None:
        """Note settings, and random numbers if their state when the optimizer was ``made`` is given.

        ``named`` returns the parameters of an optimizer, in its order. Up to step ``most_every``, samples, random
        numbers and the gradient scaler are noted in every step too.
        """
        self._most_every = most_every
        # Name and parameter group of a setting -> step -> value from this step on.
        self._settings: dict[tuple[str, str], dict[str, str | float]] = {}
        self._named = named
        # Names of parameter groups, and the keys of each.
        self._groups: list[str] = []
        self._keys: list[list[str]] = []
        self._values: list[Any] = []
        self._sources: tuple[object, ...] = ()
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        # Of a step, the rows of each batch.
        self._samples: list[tuple[int, list[list[torch.Tensor]]]] = []
        self._hashed: dict[str, list[str]] = {}
        if made:
            self._note(0, RANDOM, made)
            self._note(1, RANDOM, random_state())

    def settings(self) -> list[Setting]:
        """Return the settings by name and parameter group."""
        return [Setting(*named, values) for named, values in self._settings.items()]

    def _note(self, step: int, name: str, value: object, group: str = "") -> None:
        # NumPy's numbers are floats too.
        value = float(value) if isinstance(value, float) and math.isfinite(value) else str(value)[:_LONGEST_VALUE]
        known = self._settings.setdefault((name, group), {})
        if known.get(next(reversed(known), "")) != value:
            known[str(step)] = value

    def _is_noted(self, step: int) -> bool:
        return step <= max(NOTED_STEPS, self._most_every) or step.bit_count() == 1

    def note_gradients(self, step: int, optimizer: Optimizer) -> None:
        """Note, before the first backward pass of a step, whether it adds to gradients."""
        if not self._is_noted(step):
            return
        parts = (part for group in optimizer.param_groups for part in group["params"] if part.requires_grad)
        first = next(parts, None)
        self._note(step, GRADIENTS, "added" if first is not None and first.grad is not None else "cleared")

    def note_step(
        self,
        step: int,
        optimizer: Optimizer,
        models: Iterable[torch.nn.Module],
        inputs: Inputs,
        *,
        may_sample: bool = True,
    ) -> None:
        """Note, after a step of the optimizer, its hyperparameters and what its gradients come from.

        Most steps are as the one before, which has to be told in a few microseconds.
        """
        if not self._is_noted(step):
            return
        if len(self._keys) < min(len(optimizer.param_groups), _MOST_GROUPS):
            self._add_groups(optimizer)
        groups = zip(optimizer.param_groups, self._keys, strict=False)
        values = [value for group, keys in groups for value in map(group.get, keys)]
        if any(isinstance(value, torch.Tensor) for value in values):
            # A scheduler writes into a tensor.
            values = [*map(_plain, values)]
        # Values of a parameter group may be anything, so they are compared by identity.
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values = values
            named = ((key, name) for name, keys in zip(self._groups, self._keys, strict=False) for key in keys)
            for (key, name), value in zip(named, map(_plain, values), strict=False):
                if value is not False and value is not None:
                    self._note(step, key, value, name)
        mode = _mode(models)
        sources = inputs.clipped_to, inputs.num_backward, inputs.autocast, mode
        if sources != self._sources:
            self._sources = sources
            self._note(step, "clipped to", OFF if inputs.clipped_to is None else inputs.clipped_to)
            self._note(step, "backward passes", inputs.num_backward)
            self._note(step, "autocast", inputs.autocast)
            self._note(step, "mode", mode)
        batches = [inputs.given] if inputs.given else [tensors_in(batch) for _, batch in inputs.batches.values()]
        if any(batches):
            shapes = [(part.shape, part.dtype) for batch in batches for part in batch]
            if shapes != self._shapes:
                self._shapes = shapes
                self._note(step, BATCH, ", ".join(f"{[*shape]} {str(dtype)[6:]}" for shape, dtype in shapes))
            rows = [[part[:_MOST_SAMPLES] for part in parts_of_samples(batch)] for batch in batches]
            is_small = sum(part.nbytes for parts in rows for part in parts) <= _SMALL_BYTES
            is_due = step <= max(_SAMPLED, self._most_every) or step.bit_count() == 1
            if may_sample and any(rows) and (is_small or is_due):
                # A loader may use the memory again.
                self._samples.append((step, [[part.clone() for part in parts] for parts in rows]))
        if step <= self._most_every:
            self._note_state(step, inputs.scaler)

    def _add_groups(self, optimizer: Optimizer) -> None:
        """Name groups that the optimizer has got by their first parameters; the name of one alone is empty."""
        groups, num_known = optimizer.param_groups[:_MOST_GROUPS], len(self._keys)
        names = [logical_name(name) for name, _ in self._named(optimizer)] if len(groups) > 1 else []
        firsts = itertools.accumulate((len(group["params"]) for group in groups), initial=0)
        of_groups = [names[first] if first < len(names) else "" for first, _ in zip(firsts, groups, strict=False)]
        self._groups += of_groups[num_known:]
        self._keys += [
            [key for key, value in group.items() if key not in _NOT_SHOWN and _plain(value) is not None]
            for group in groups[num_known:]
        ]

    def _note_state(self, step: int, scaler: torch.amp.GradScaler | None) -> None:
        """Note what else the next step goes on from, which waits for the device."""
        self.samples()
        for name in GENERATORS:
            self._note(step, RANDOM, random_state(name), name)
        state = scaler.state_dict() if scaler is not None else {}
        for key, name in _OF_SCALER.items():
            if key in state:
                self._note(step, name, state[key])

    def look(self, step: int, models: Iterable[torch.nn.Module], parameters: Iterable[torch.Tensor]) -> None:
        """Note, after the step before, what modules drop and share, and how many elements are trained from now on."""
        if not self._is_noted(step - 1):
            return
        kinds = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
        models = [*models]
        every = (module for model in models for module in model.modules())
        tied: dict[int, list[str]] = {}
        # A module may have a method of its own that does not take the argument.
        pairs = (torch.nn.Module.named_parameters(model, remove_duplicate=False) for model in models)
        for name, part in chain.from_iterable(pairs):
            tied.setdefault(id(part), []).append(logical_name(name))
        shared = sorted(" = ".join(sorted(names)) for names in tied.values() if len(names) > 1)
        self._note(step, "tied parameters", ", ".join(shared) or OFF)
        rates = {module.p for module in every if isinstance(module, kinds) and module.p}
        self._note(step, "dropout", ", ".join(f"{rate:g}" for rate in sorted(rates)) or OFF)
        self._note(step, "trained elements", sum(part.numel() for part in parameters if part.requires_grad))

    def samples(self) -> dict[str, list[str]]:
        """Return step -> hash of each sample of the batch, and wait for the device."""
        for step, rows in self._samples:
            self._hashed[str(step)] = [sample for parts in rows for sample in hashed_samples(parts)]
        self._samples = []
        return self._hashed


class TrainingNotes:
    """Notes of a workload on what its measured steps train with, for the sentences of a failure on what was edited."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module) -> None:
        names = {id(part): name for name, part in model.named_parameters()}
        every = [part for group in optimizer.param_groups for part in group["params"]]
        self._optimizer, self._model, self._num_steps = optimizer, model, 0
        self._training = Training(lambda _: [(names.get(id(part), ""), part) for part in every])
        self._training.look(1, [model], every)

    def end_step(self, batch: object, num_backward: int = 1, clipped_to: float | None = None) -> None:
        """Note a step after its time, with its batch; of many steps, the first ones and some later ones."""
        self._num_steps += 1
        inputs = Inputs({0: (None, batch)}, num_backward, clipped_to=clipped_to)
        self._training.note_step(self._num_steps, self._optimizer, [self._model], inputs)

    def series(self) -> list[Series]:
        """Return the notes for the result of the rank, and wait for the device."""
        if not self._num_steps:
            return []
        names = type(self._optimizer).__name__, type(self._model).__name__
        settings, samples = self._training.settings(), self._training.samples()
        return [Series(names[0], self._num_steps, names[1], settings=settings, samples=samples)]


def tensors_in(batch: object) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [part for part in _flat([batch]) if isinstance(part, torch.Tensor)]


def parts_of_samples(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those tensors of a batch that have a row for each of its samples."""
    plain = [part for part in tensors if type(part) is torch.Tensor and part.layout is torch.strided]
    plain = [part.detach() for part in plain if part.dim() and part.numel() and not part.is_meta]
    return [part for part in plain if len(part) == len(plain[0])]


def hashed_samples(parts: Iterable[torch.Tensor]) -> list[str]:
    """Return the hash of each sample, and wait for the device."""
    rows = [part.cpu().reshape(len(part), -1).contiguous().view(torch.uint8).numpy() for part in parts]
    return [
        hashlib.blake2b(b"".join(row.tobytes() for row in sample), digest_size=8).hexdigest()
        for sample in zip(*rows, strict=True)
    ]


def random_state(*names: str) -> str:
    """Return the begin of the hash of the states of generators, by default of torch's on the CPU."""
    return digest([GENERATORS[name]() for name in names or [""]])[:8]


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state()
    return [state[1].tolist(), state[2]]


# Group of the setting of random numbers -> the state of the generator; that of torch on the CPU is in no group.
GENERATORS: Mapping[str, Callable[[], object]] = {
    "": lambda: torch.get_rng_state().tolist(),
    "CUDA": lambda: torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else [],
    "NumPy": _numpy_state,
    "Python": random.getstate,
}


def _plain(value: Any) -> Any:
    """Return a number or text, or a tuple of these; None for any other value, such as a tensor on a device."""
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1 and value.dtype in _NUMBERS:
        # No operator, which a count would see; and as short as the number that the script gave.
        return float(f"{_NUMBERS[value.dtype].from_address(value.data_ptr()).value:.7g}")
    parts = value if isinstance(value, tuple) else (value,)
    return value if all(isinstance(part, _VALUES) for part in parts) else None


def _flat(parts: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """Yield what lists and dictionaries hold; other containers may compute what they hold, or hold themselves."""
    for part in parts:
        if isinstance(part, dict | UserDict | list | tuple) and depth < _DEEPEST:
            yield from _flat(part if isinstance(part, list | tuple) else part.values(), depth + 1)
        else:
            yield part
