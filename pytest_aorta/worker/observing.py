"""Observation of an unedited training script: the steps, losses, gradient norms and weights of each optimizer.

Torch has public hooks for the steps of optimizers. Functions that have no hook are replaced:
``torch.autograd.backward``, which ``Tensor.backward`` calls too, and ``clip_grad_norm_`` of ``torch.nn.utils`` and of
FSDP1.

Nothing here is collective, since ranks may not all arrive: each rank records what it has, and the records of all ranks
are joined when they have ended. Nothing reads a number from a device before the script has ended.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from statistics import median
from traceback import walk_stack
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from pytest_aorta.common import variables
from pytest_aorta.common.clock import time
from pytest_aorta.common.text import brief, counted, distinct
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.evidence import log_tail
from pytest_aorta.result.folder import OUTPUT_LOG
from pytest_aorta.result.series import Series, digest
from pytest_aorta.result.trace.profiled_steps import Costs, Profile, joined_costs
from pytest_aorta.worker.accelerator import own_device
from pytest_aorta.worker.finite import MOST_SEARCHED, Optimizers, freeze, modules, refuse_values, untraced
from pytest_aorta.worker.layout import is_dtensor, local_part
from pytest_aorta.worker.overlap import ScriptCapture
from pytest_aorta.worker.simulation import is_simulated, note_padded
from pytest_aorta.worker.steps import Progress, StepCounter, StepTimer, calls_by_step, prepared
from pytest_aorta.worker.weight_hash import LocalHashes, logical_name

_Named: TypeAlias = Callable[[Optimizer], list[tuple[str, torch.Tensor]]]
# Steps of an optimizer that are timed before some are profiled; those after the profiled ones are timed too.
TIMED_STEPS = 20
# The warm-up steps that costs need: one that is counted, and one that settles after it.
STEPS_TO_COUNT = 2
# Steps of other optimizers in one profiled step; after more, the script has left the loop of the profiled optimizer.
_MOST_WITHIN = 64
# Checks of all parameters take at most this part of the time, beside those after steps 1, 2, 4, 8 and so on.
_CHECKING = 0.002
# Values on a device are joined when there are this many, since each value alone takes a block of memory.
_JOINED = 256
# Hashes of each parameter show where launches differ; those of many steps would make a large result.
_STEPS_BY_TENSOR, _MOST_TENSORS = 5, 20_000
# Of a launch that hashes every step, the first steps that it hashes.
_MOST_EVERY = 1000
# Wrappers by the short names that readers know.
_SHORT_NAMES = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP", "OptimizedModule": "compiled"}
_LONGEST_NAME = 200
# Processor time of child processes that is more than that of a tool which the script has called, in seconds.
_CHILD_S = 2.0
_ABOUT_DEVICES = re.compile(r"\b(cuda|gpus?|accelerators?)\b", re.IGNORECASE)
_LAST_LINES = 5
_LOSS, _NORM = "loss", "gradient norm"
# The code with which torch calls an optimizer's step, between the hooks.
_STEP = Optimizer.profile_hook_step(len).__code__


class Values:
    """Numbers in the order of their recording; those on a device are read only at the end."""

    def __init__(self) -> None:
        self._parts: list[float | torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []

    def add(self, value: float | torch.Tensor) -> None:
        """Add a number, or a tensor with one element on a device."""
        if isinstance(value, torch.Tensor):
            self._waiting.append(value)
            if len(self._waiting) == _JOINED:
                self._join()
        else:
            self._join()
            self._parts.append(value)

    def _join(self) -> None:
        if self._waiting:
            self._parts.append(torch.cat(self._waiting))
            self._waiting = []

    def read(self) -> list[float]:
        """Return all values, and wait for the device."""
        self._join()
        lists = ([part] if isinstance(part, float) else part.tolist() for part in self._parts)
        return [value for values in lists for value in values]


class _Gradients:
    """Hashes by step of what this rank adds to gradients, before they are reduced; sharded parameters have none.

    Attributes:
        step: The step that runs.
        names: Id of a parameter -> its name. In the first backward pass, modules of FSDP2 have other parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.step, self.names = 1, dict[str, str]()
        self._hashes, self._steps = LocalHashes(0), list[int]()
        for part in (part for group in optimizer.param_groups for part in group["params"]):
            if part.requires_grad and part.is_leaf and not is_dtensor(part):
                part.register_hook(untraced(functools.partial(self._note, str(id(part)))))

    def _note(self, key: str, gradient: torch.Tensor) -> None:
        if self.step <= _MOST_EVERY:
            self._steps.append(self.step)
            self._hashes.add(len(self._steps), [(key, gradient)])

    def by_step(self) -> dict[str, str]:
        """Return step -> hash, and wait for the device."""
        found = self._hashes.digests(self.names).hashes
        by_step: dict[int, list[str]] = {}
        for number, step in enumerate(self._steps, 1):
            by_step.setdefault(step, []).append(found.get(str(number), ""))
        # The order in which gradients are computed may vary.
        return {str(step): digest(sorted(parts)) for step, parts in by_step.items()}


class _Optimized:
    """The series of one optimizer: its steps from the first, which has the number 1, with what belongs to each."""

    def __init__(
        self, optimizer: Optimizer, named: _Named, device: torch.device, warmup: int, gradients: _Gradients | None
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name, self.model = type(optimizer).__name__, ""
        self.num_steps = 0
        # The numbers of the timed steps.
        self.timed: list[int] = []
        # Places of the steps in the order of all optimizers' steps.
        self.turns: list[int] = []
        self.timer = StepTimer(device, has_progress=False)
        self.counter: StepCounter | None = None
        self.capture: ScriptCapture | None = None
        self._profiled_until = 0
        # The optimizers that stepped in the counted step, this one too.
        self.counted_with: set[_Optimized] = set()
        self._is_count_due = False
        self._num_within = 0
        # Gradients are hashed where every step is.
        self._gradients = gradients
        if gradients is not None:
            gradients.names = {str(id(part)): logical_name(name) for name, part in named(optimizer)}
        by_tensor = max(_STEPS_BY_TENSOR, _MOST_TENSORS // max(1, len(named(optimizer)))) if gradients else 0
        self.hashes, self.buffers = (LocalHashes(by_tensor or _STEPS_BY_TENSOR) for _ in range(2))
        # What has the model's buffers, kept as long as the optimizer: the names before them, and the module's mapping
        # of buffers with the names of those that are not persistent.
        self._owners: list[tuple[str, Mapping[str, torch.Tensor | None], Collection[str]]] = []
        # A step whose weights should be hashed was profiled, so that the next one that is not has its place.
        self.is_hash_due = False
        self._named, self._warmup = named, warmup
        self._counted: ExitStack | None = None
        self._places: list[tuple[int, str]] = []
        self._values = Values()
        self._last_words: weakref.finalize[Any, Optimizer] | None = None

    @property
    def is_counted(self) -> bool:
        """Return whether the step that has begun is profiled."""
        return self._counted is not None or (self.capture is not None and self.capture.is_running)

    def note_step(self, other: _Optimized) -> None:
        """Note a step of any optimizer, which is a part of this one's step; end a profile that would not end."""
        if self._counted is not None:
            self.counted_with.add(other)
        self._num_within = 0 if other is self else self._num_within + 1
        if self._num_within <= _MOST_WITHIN or not self.is_counted:
            return
        if self._counted is not None:
            self.counter = None
            self.counted_with.clear()
        self.end_capture()
        if self.capture is not None:
            self.capture.problem = f"in one profiled step, other optimizers made more than {_MOST_WITHIN} steps"

    def end_capture(self) -> None:
        """End the profile of steps, or the count of one, if it runs."""
        if self.capture is not None:
            self.capture.end()
        if self._counted is not None:
            self._counted.close()
            self._counted = None

    def give_way(self) -> None:
        """End the profile of steps, or the count of one, for a profiler of the script."""
        if self._counted is not None and self.counter is not None:
            self.counter.give_way()
        elif self.capture is not None and self.capture.is_running:
            self.capture.give_way()
        self.end_capture()

    def profile(self) -> Profile:
        """Return the overlap of the profiled steps, or how many steps the script lacks for them."""
        capture = self.capture or ScriptCapture(self.timer.device)
        capture.end()
        if capture.is_open:
            left = capture.num_steps_left + (0 if self.capture else max(TIMED_STEPS - self.timer.num_steps, 0))
            return Profile(
                problem=f"the script ended before steps were profiled, which follow {TIMED_STEPS} timed ones; run "
                f"{counted(left, 'more step')}"
            )
        return capture.read(median(self.timer.step_times_ms()))

    def end_step(self, values: Sequence[tuple[str, float | torch.Tensor]]) -> None:
        """End the step at the optimizer's step; ``values`` are the quantities of the step."""
        self.num_steps += 1
        if self._gradients is not None:
            self._gradients.step = self.num_steps + 1
        if self.timer.close():
            self.timed.append(self.num_steps)
        if self._counted is not None:
            self.end_capture()
        elif self.capture is not None and self.capture.is_running:
            self.capture.boundary()
        for quantity, value in values:
            self._places.append((self.num_steps, quantity))
            self._values.add(_copy(value) if isinstance(value, torch.Tensor) else value)

    def begin_step(self, *, may_profile: bool, is_covered: bool) -> bool:
        """Begin the next step, and return whether it is profiled; the warm-up comes after the first step.

        ``may_profile`` is whether a profiler may begin here, ``is_covered`` whether such a step was counted
        with a step of this optimizer in it.
        """
        left = self._warmup - self.num_steps + 1
        self._is_count_due = self._is_count_due or left == STEPS_TO_COUNT
        if self.is_counted:
            self._profiled_until = self.num_steps + 1
            return True
        # A step that is not timed follows, so that the timed steps begin without the profiler's end.
        if self.num_steps == self._profiled_until:
            return False
        if self.timer.num_steps >= TIMED_STEPS and may_profile:
            self.capture = self.capture or ScriptCapture(self.timer.device)
            if self.capture.is_open:
                self.capture.begin()
                self._profiled_until = self.num_steps + 1
                return self.capture.is_running
        if self._is_count_due and may_profile and not is_covered:
            self._is_count_due = False
            self.counter = StepCounter(self.timer.device)
            self._counted = ExitStack()
            self._counted.enter_context(self.counter.step())
            self._profiled_until = self.num_steps + 1
            return True
        if left <= 0:
            self.timer.open()
        return False

    def belongs_to(self, roots: Sequence[tuple[int, torch.nn.Module]], *, hash_buffers: bool) -> None:
        """Take the names and the buffers of the largest modules that have the parameters, as of :func:`_roots_of`."""
        self.model = " + ".join(dict.fromkeys(_title(root) for _, root in roots))[:_LONGEST_NAME]
        # The order in which modules are found may vary.
        ordered = sorted(roots, key=itemgetter(0)) if hash_buffers else []
        every = [each for _, root in ordered for each in root.named_modules()]
        self._owners = [
            (f"{name}." if name else "", module._buffers, getattr(module, "_non_persistent_buffers_set", ()))
            for name, module in every
        ]

    def hash(self, *, is_last: bool = False) -> None:
        """Hash this rank's parts of the parameters, and its buffers, after this step, unless that is done.

        The hash of the last step has what the script did to them after it, whichever steps are hashed.
        """
        if (optimizer := self.optimizer()) is not None:
            self._hash(self._named(optimizer), again=is_last)

    def _hash(self, named: Iterable[tuple[str, torch.Tensor]], *, again: bool) -> None:
        self.hashes.add(self.num_steps, named, again=again)
        buffers = [
            (before + key, buffer)
            for before, own, left_out in self._owners
            for key, buffer in own.items()
            if buffer is not None and key not in left_out
        ]
        names = distinct((name for name, _ in buffers), " ({})")
        pairs = zip(names, (buffer for _, buffer in buffers), strict=True)
        self.buffers.add(self.num_steps, pairs, again=again)

    def hash_at_the_end(self) -> None:
        """Have the parameters hashed when the optimizer is freed, in case that the script drops it with the model."""
        if (optimizer := self.optimizer()) is None:
            return
        if self._last_words is not None:
            self._last_words.detach()
        # The optimizer keeps the tensors alive itself, and this list is dropped with it.
        named = self._named(optimizer)
        self._last_words = weakref.finalize(optimizer, self._hash_freed, named)
        self._last_words.atexit = False

    def _hash_freed(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        # The collector may free an optimizer while torch traces with fake tensors.
        with _disable_current_modes():
            self._hash(named, again=True)
        self._owners.clear()

    def stop(self) -> None:
        """End a profile that runs, and no longer wait for the optimizer's end."""
        self.end_capture()
        if self._last_words is not None:
            self._last_words.detach()

    def values(self) -> dict[str, dict[int, float]]:
        """Return the quantities by step: the sum of the micro-batches' losses, and the norm of all gradients.

        A norm that is not finite, with a loss after it, is of an iteration whose step a ``GradScaler`` has skipped.
        """
        steps: dict[int, list[tuple[str, float]]] = {}
        for (step, quantity), value in zip(self._places, self._values.read(), strict=True):
            found = steps.setdefault(step, [])
            if quantity == _LOSS and any(name == _NORM and not math.isfinite(norm) for name, norm in found):
                found.clear()
            found.append((quantity, value))
        by_step: dict[str, dict[int, float]] = {_LOSS: {}, _NORM: {}}
        for step, found in steps.items():
            losses, norms = ([value for name, value in found if name == kind] for kind in (_LOSS, _NORM))
            if losses:
                by_step[_LOSS][step] = sum(losses)
            if norms:
                by_step[_NORM][step] = norms[0] if len(norms) == 1 else math.hypot(*norms)
        return by_step

    def series(self, *, is_main: bool, is_alone: bool) -> Series:
        """Return everything that was recorded of this optimizer."""
        values = self.values()
        return Series(
            optimizer=self.name,
            model=self.model,
            num_steps=self.num_steps,
            is_main=is_main,
            collectives=self.calls,
            step_times_ms=self.timer.step_times_ms(),
            loss={str(step): value for step, value in values[_LOSS].items()},
            grad_norm={str(step): value for step, value in values[_NORM].items()},
            weights=self.hashes.digests(),
            buffers=self.buffers.digests(),
            gradients=self._gradients.by_step() if self._gradients else {},
            turns=[] if is_alone else self.turns,
        )

    @property
    def calls(self) -> float | None:
        """The number of collectives in a timed step; None without one."""
        return calls_by_step(self.timer.spans_ns)


class Observer:
    """Recorder of all optimizers that step in this process, from :meth:`start` to :meth:`stop`.

    Attributes:
        record: How steps are recorded. Weights are this rank's parts of the parameters; they are hashed before the
            first step, after steps 1, 2, 4, 8 and so on, and after the last one; in place of a profiled step, after
            the next one that is not.
        optimizers: The optimizers that have stepped.
        has_optimizer: Whether the script has made an optimizer.
        has_loaded: Whether the script has called ``torch.load``.
        device: The device of the steps; the CPU before the first step.
    """

    def __init__(self, record: StepRecording = StepRecording()) -> None:  # noqa: B008 - it is frozen
        self.record = record
        self.has_loaded = self.has_optimizer = False
        self.optimizers = Optimizers()
        self.began_s = time.perf_counter()
        self._children_before_s = _all_children_s()
        self._all: list[_Optimized] = []
        self.device = torch.device("cpu")
        self._progress: Progress | None = None
        self._values: list[tuple[str, float | torch.Tensor]] = []
        # What a scaler has returned, for what it was given, until the next backward pass.
        self._scaled: tuple[object, object] = None, None
        # Optimizers that were made since the last backward pass; their gradients are watched from their first step on.
        self._unwatched: list[weakref.ref[Optimizer]] = []
        self._gradients: weakref.WeakKeyDictionary[Optimizer, _Gradients] = weakref.WeakKeyDictionary()
        self._stepping: list[Optimizer] = []
        self._stepped_within: list[Optimizer] = []
        self._is_in_backward = self._is_counting = False
        self._turn = 0
        # The optimizer whose step ended the last profile, with its steps and the turn until then.
        self._profiled_last: tuple[_Optimized, int, int] | None = None
        self._is_simulated = is_simulated()
        self._looked_s = self._look_s = 0.0
        self._undo: list[Callable[[], object]] = []

    def start(self) -> Observer:
        """Observe from now on."""
        if not self._undo:
            begin, end = map(untraced, (self._begin, self._end))
            pre, post = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
            self._undo += [pre.remove, post.remove]
            self._wrap(torch.autograd, "backward", self._backward)
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._wrap(module, "clip_grad_norm_", self._clip)
            self._wrap(torch, "load", self._load)
            self._wrap(gc, "freeze", freeze)
            self._wrap(torch.amp.GradScaler, "scale", self._scale)
            self._wrap(Optimizer, "__init__", self._made)
            self._wrap(torch.profiler.profile, "prepare_trace", self._give_way)
            self._wrap(torch.profiler.profile, "stop_trace", self._may_resume)
        return self

    def stop(self) -> None:
        """Undo :meth:`start`, and end a profile that runs."""
        for one in self._all:
            one.stop()
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # What is traced for a graph has no value.
            return original(*args, **kwargs) if torch.compiler.is_compiling() else around(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(functools.partial(setattr, owner, name, original))

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_backward:  # activation checkpointing computes gradients inside of a backward pass
            return original(tensors, *args, **kwargs)
        if self._progress is None:
            self._enter(1)
        self._watch_gradients()
        # The last stage of a pipeline passes its loss as a sequence, and the others their outputs with gradients.
        losses = tensors if isinstance(tensors, list | tuple) else [tensors]
        (scaled, loss), self._scaled = self._scaled, (None, None)
        if len(losses) == 1 or not (args or kwargs.get("grad_tensors")):
            for one in losses:
                self._note(_LOSS, loss if scaled is not None and scaled is one else one)
        self._is_in_backward = True
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self._is_in_backward = False
            stepped, self._stepped_within = self._stepped_within, []
        for optimizer in stepped:
            self._end_step(optimizer)
        return result

    def _scale(self, original: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self._scaled = scaled, outputs
        return scaled

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        num_noted = len(self._values)
        norm = original(*args, **kwargs)
        # FSDP1's function calls torch's, where parameters are not sharded.
        del self._values[num_noted:]
        self._note(_NORM, norm)
        return norm

    def _note(self, quantity: str, value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or self._is_simulated:
            return
        # Most scripts on CPU take this way, which has to cost less than 1% of a step of a millisecond.
        if type(value) is torch.Tensor and value.is_cpu:
            self._values.append((quantity, value if self._is_counting else float(value.item())))
        elif not _is_empty(value):
            # What the recorder does must not count among the costs of a step, so there the copy is made after the step.
            self._values.append((quantity, value if self._is_counting else _copy(value)))

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.has_loaded = True
        return original(*args, **kwargs)

    def _made(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self.has_optimizer and (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
            self._wrap(fsdp.FullyShardedDataParallel, "clip_grad_norm_", self._clip)
        self.has_optimizer = True
        original(*args, **kwargs)
        if self.record.hash_every_step and not self._is_simulated:
            self._unwatched.append(weakref.ref(args[0]))

    def _watch_gradients(self) -> None:
        while self._unwatched:
            if (optimizer := self._unwatched.pop()()) is not None:
                self._gradients[optimizer] = _Gradients(optimizer)

    def _give_way(self, original: Callable[..., Any], profiler: torch.profiler.profile) -> Any:
        for one in self._all:
            one.give_way()
        prepared.add(id(profiler))
        return original(profiler)

    def _may_resume(self, original: Callable[..., Any], profiler: torch.profiler.profile) -> Any:
        prepared.discard(id(profiler))
        return original(profiler)

    def _enter(self, step: int) -> None:
        self._progress = self._progress or Progress()
        self._progress.enter(step)

    def _begin(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # The step of an optimizer that has raised has no end.
        if self._stepping and (num_running := _num_running_steps()):
            del self._stepping[num_running - 1 :]
        self._stepping.append(optimizer)
        # The weights before the first step show which ranks hold replicas, before each trains on its own data.
        if len(self._stepping) == 1 and self._find(optimizer) is None:
            found = self._new(optimizer)
            if self.record.hash_weights and not (self._is_counting or self._is_simulated):
                found.hash()

    def _end(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """End a step of an optimizer and begin the next, unless the optimizer is a part of another one that steps."""
        if self._stepping:
            self._stepping.pop()
        if self._stepping:
            return
        if self._is_in_backward:
            # Where a hook of each gradient steps an optimizer; a profiler that begins there would end with the hook.
            self._stepped_within.append(optimizer)
        else:
            self._end_step(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        if (found := self._find(optimizer)) is None:
            return
        was_counting = self._is_counting
        if was_counting:
            for one in self._all:
                one.note_step(found)
        found.end_step(self._values)
        self._values = []
        self._is_counting = was_counting and any(one.is_counted for one in self._all)
        self._turn += 1
        before = found.turns[-1] if found.turns else 0
        found.turns.append(self._turn)
        # Optimizers that take turns, as those of a GAN, are in one step.
        is_alone = len(self._all) == 1
        since = (one.num_steps for one in self._all if one.turns and one.turns[-1] > before)
        self._enter(1 + (found.num_steps if is_alone else min(since)))
        is_chosen = found.num_steps.bit_count() == 1 or found.is_hash_due
        is_chosen = is_chosen or (self.record.hash_every_step and found.num_steps <= _MOST_EVERY)
        found.is_hash_due = is_chosen and self._is_counting
        # What the recorder computes must not count among the costs of a step.
        is_look_due = time.perf_counter() - self._looked_s > self._look_s / _CHECKING
        if (is_chosen or is_look_due) and not (self._is_counting or self._is_simulated):
            with ExitStack() as paused:
                for one in self._all:
                    paused.enter_context(one.timer.paused())
                self._look(found)
                if is_chosen and self.record.hash_weights:
                    found.hash()
        if is_chosen and self.record.hash_weights and not self._is_simulated:
            found.hash_at_the_end()
        counted = [one for one in self._all if one.counter is not None]
        is_covered = len(counted) >= MOST_SEARCHED or (
            not is_alone and any(found in one.counted_with for one in counted)
        )
        if was_counting and not self._is_counting:
            self._profiled_last = found, found.num_steps, self._turn
        may_profile = not (self._is_counting or self.record.hash_every_step) and self._may_profile()
        is_profiled = found.begin_step(may_profile=may_profile, is_covered=is_covered)
        self._is_counting = is_profiled or self._is_counting

    def _may_profile(self) -> bool:
        """Return whether an iteration lies between the last profile and now.

        Torch corrupts its memory if a ``record_function`` that was entered under one profiler, as of an iteration in
        which two optimizers step, is left under another one.
        """
        if self._profiled_last is None:
            return True
        last, num_steps, turn = self._profiled_last
        return last.num_steps > num_steps or self._turn - turn > _MOST_WITHIN

    def _find(self, optimizer: Optimizer) -> _Optimized | None:
        return next((one for one in self._all if one.optimizer() is optimizer), None)

    def _new(self, optimizer: Optimizer) -> _Optimized:
        if not self._all:
            self.device = own_device()
        self.optimizers.add(optimizer)
        self._watch_gradients()
        named, gradients = self.optimizers.named, self._gradients.get(optimizer)
        if self._is_simulated:
            note_padded(named(optimizer))
        found = _Optimized(optimizer, named, self.device, self.record.warmup, gradients)
        self._all.append(found)
        if len(self._all) <= MOST_SEARCHED:
            inside = modules()
            roots = _roots_of(named(optimizer, every=inside), inside)
            found.belongs_to(roots, hash_buffers=self.record.hash_weights)
        return found

    def _look(self, found: _Optimized) -> None:
        began_s = time.perf_counter()
        self.optimizers.look(found.num_steps, f"step {found.num_steps}")
        self._looked_s = time.perf_counter()
        self._look_s = self._looked_s - began_s

    @property
    def num_steps(self) -> int:
        """The largest number of steps of an optimizer."""
        return max((one.num_steps for one in self._all), default=0)

    @property
    def main(self) -> _Optimized | None:
        """The optimizer with most steps, among those whose timed steps have collectives if there are any."""
        timed = [one for one in self._all if one.timer.num_steps]
        return max(timed, key=lambda one: (bool(one.calls), one.num_steps), default=None)

    def costs(self) -> Costs | None:
        """Return the costs of steps that have every optimizer's step in them, added up; None if none was counted.

        The step of an optimizer that takes turns with others has their steps in it, as that of a GAN's generator.
        """
        parts: list[Costs] = []
        covered: set[_Optimized] = set()
        counted = [(one, one.counter) for one in self._all if one.counter is not None]
        for one, counter in sorted(counted, key=lambda entry: -len(entry[0].counted_with)):
            if one not in covered:
                covered |= one.counted_with
                parts.append(counter.costs())
        return joined_costs(parts) if parts else None

    def end(self) -> None:
        """Look at the parameters and hash them once more, where the optimizers still exist; after the script."""
        for one in self._all:
            one.end_capture()
            if one.optimizer() is not None and not self._is_simulated:
                self._look(one)
                if self.record.hash_weights:
                    one.hash(is_last=True)

    def series(self) -> list[Series]:
        """Return the series of all optimizers in the order of their first steps."""
        main = self.main
        # The first step of an optimizer may have raised.
        stepped = [one for one in self._all if one.num_steps]
        return [one.series(is_main=one is main, is_alone=len(stepped) == 1) for one in stepped]

    @property
    def is_without_training(self) -> bool:
        """Return whether the script does not train: it made no optimizer, loaded nothing, and delegated to nobody."""
        return not (self.has_optimizer or self.has_loaded or self._child_s() > _CHILD_S or self._lacks_devices())

    def absence(self) -> str:
        """Return why no step was timed, and the last lines of the script."""
        return f"{self._cause()}{_last_lines()}"

    def _cause(self) -> str:
        if self.num_steps:
            needed = self.record.warmup + 2
            if self._is_simulated:
                return (
                    f"its optimizer made {counted(self.num_steps, 'step')}, fewer than {needed}: data that are split "
                    f"over more ranks have fewer steps, and simulated ranks exchange no values, so a script that ends "
                    f"at a reduced loss may end early; give it a number of steps"
                )
            return (
                f"its optimizer made {counted(self.num_steps, 'step')}, and the first {needed - 1} are not timed, as "
                f"the first has no begin and {self.record.warmup} warm up; run at least {needed} steps, or lower "
                f"warmup in record_optimizer_steps(warmup={self.record.warmup})"
            )
        if self._lacks_devices():
            return "no optimizer stepped, and the script's last lines say that it lacks GPUs; this rank has none"
        if (child_s := self._child_s()) > _CHILD_S:
            return (
                f"no optimizer stepped in this process, and child processes took {child_s:.0f} s of processor time: "
                f"their steps are not recorded; have torchrun start the ranks, and not the script"
            )
        if self.has_loaded:
            return (
                "no optimizer stepped after torch.load; if the script resumed from the checkpoint of a complete run, "
                "remove the checkpoint, or have the script write it to a folder of each launch"
            )
        return "the script made an optimizer, and no optimizer stepped"

    def _child_s(self) -> float:
        """Return the processor time of child processes that have ended since the observer was made, in seconds."""
        return _all_children_s() - self._children_before_s

    def _lacks_devices(self) -> bool:
        return own_device().type == "cpu" and bool(_ABOUT_DEVICES.search(_last_lines()))

    def refuse(self, rank: int) -> None:
        """Check the losses, the gradient norms, and the parameters after steps; not collective.

        Raises:
            NotFinite: A value of this rank is NaN or infinite; the message names the first step.
        """
        for one in self._all:
            found = [(step, name, value) for name, by_step in one.values().items() for step, value in by_step.items()]
            refuse_values(found, rank, f"step {{}} of {one.num_steps}", self.optimizers)
        self.optimizers.refuse(rank)


def _num_running_steps() -> int:
    """Return how many optimizers' steps have begun, each called by the one before; 0 where they are compiled."""
    return sum(frame.f_code is _STEP for frame, _ in walk_stack(sys._getframe()))


def _is_empty(value: torch.Tensor) -> bool:
    """Return whether a tensor has no data, as where a program tries a kernel or estimates memory before it trains."""
    return value.is_meta or isinstance(local_part(value), FakeTensor)


def _copy(value: torch.Tensor) -> float | torch.Tensor:
    """Return a copy of a tensor with one element, since the script may write into its memory; a number on CPU."""
    if value.device.type == "cpu" and not is_dtensor(value):
        return float(value.item())
    own = local_part(value.detach())
    return float(own) if own.device.type == "cpu" else own.reshape(1).to(torch.float64, copy=True)


def _all_children_s() -> float:
    """Return the processor time of all child processes that have ended, in seconds."""
    used = os.times()
    return used.children_user + used.children_system


def _last_lines() -> str:
    """Return the last lines of this rank's output, each behind a bar; empty without any."""
    if (folder := os.environ.get(variables.RANK_FOLDER)) is None:
        return ""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lines = log_tail(Path(folder) / OUTPUT_LOG)[-_LAST_LINES:]
    return "".join(["; its last lines:" if lines else "", *(f"\n  | {brief(line)}" for line in lines)])


def _roots_of(
    named: Iterable[tuple[str, torch.Tensor]], every: Sequence[torch.nn.Module]
) -> list[tuple[int, torch.nn.Module]]:
    """Return the largest modules that have some of the parameters, each with the place of its first parameter."""
    places = {id(part): place for place, (_, part) in enumerate(named)}
    parents = {id(child): module for module in every for child in module.children()}
    found: dict[int, tuple[int, torch.nn.Module]] = {}
    for module in every:
        if own := [places[id(part)] for part in module._parameters.values() if id(part) in places]:
            while (parent := parents.get(id(module))) is not None:
                module = parent
            first, _ = found.get(id(module), (len(places), module))
            found[id(module)] = min(first, *own), module
    return list(found.values())


def _title(module: torch.nn.Module) -> str:
    """Return the class of a module such as ``DDP(Net)``: wrappers of torch are followed by what they wrap."""
    name = type(module).__name__
    children = list(module.children())
    return f"{_SHORT_NAMES[name]}({_title(children[0])})" if name in _SHORT_NAMES and len(children) == 1 else name
