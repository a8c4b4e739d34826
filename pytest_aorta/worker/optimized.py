"""The record of one optimizer's steps: times, losses, gradient norms, hashes, and its profiled steps.

Nothing here reads a number from a device before the script has ended.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from pytest_aorta.common.text import counted
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.series import Series, digest
from pytest_aorta.result.trace.profiled_steps import Profile
from pytest_aorta.worker.collectives import calls_by_step
from pytest_aorta.worker.costs import STEPS_TO_COUNT, StepCounter
from pytest_aorta.worker.finite import optimizers, parts_of, untraced
from pytest_aorta.worker.layout import NamedTensor, is_dtensor, local_part
from pytest_aorta.worker.overlap import ScriptCapture
from pytest_aorta.worker.steps import StepTimer
from pytest_aorta.worker.torch_private import buffers_of, disable_current_modes
from pytest_aorta.worker.training import Training
from pytest_aorta.worker.weight_hash import LocalHashes, logical_name

_Owner: TypeAlias = tuple[str, Mapping[str, torch.Tensor | None], Collection[str]]
_Named: TypeAlias = Callable[[Optimizer], list[NamedTensor]]
# Steps of an optimizer that are timed before some are profiled; those after the profiled ones are timed too.
TIMED_STEPS = 20
# Steps of other optimizers in one profiled step; after more, the script has left the loop of the profiled optimizer.
MOST_WITHIN = 64
# Values on a device are joined when there are this many, since each value alone takes a block of memory.
_JOINED = 256
# Hashes of each parameter show where launches differ; those of many steps would make a large result.
_STEPS_BY_TENSOR, _MOST_TENSORS = 5, 20_000
# Of a launch that hashes every step, the first steps that it hashes.
MOST_EVERY = 1000
# Wrappers by the short names that readers know.
_SHORT_NAMES = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP", "OptimizedModule": "compiled"}
_LONGEST_NAME = 200
LOSS, NORM = "loss", "gradient norm"
# Values of an optimizer's state that are hashed.
_HASHED = (torch.Tensor, int, float)


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


class Gradients:
    """Hashes by step of what this rank adds to gradients, before they are reduced; sharded parameters have none.

    Attributes:
        step: The step that runs.
        names: Id of a parameter -> its name. In the first backward pass, modules of FSDP2 have other parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.step, self.names = 1, dict[str, str]()
        self._hashes, self._steps = LocalHashes(0), list[int]()
        for part in parts_of(optimizer):
            if part.requires_grad and part.is_leaf and not is_dtensor(part):
                part.register_hook(untraced(functools.partial(self._note, str(id(part)))))

    def _note(self, key: str, gradient: torch.Tensor) -> None:
        if self.step <= MOST_EVERY:
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


class Optimized:
    """The series of one optimizer: its steps from the first, which has the number 1, with what belongs to each."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: _Named,
        device: torch.device,
        record: StepRecording,
        gradients: Gradients | None,
        prepared: Collection[int],
        random: str,
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
        # Which of both has begun last.
        self._begun: StepCounter | ScriptCapture | None = None
        self._profiled_until = 0
        # The optimizers that stepped in the counted step, this one too.
        self.counted_with: set[Optimized] = set()
        self._is_count_due = False
        self._num_within = 0
        # Gradients are hashed where every step is.
        self._gradients = gradients
        by_tensor = _STEPS_BY_TENSOR
        if gradients is not None:
            gradients.names = {str(id(part)): logical_name(name) for name, part in named(optimizer)}
            by_tensor = max(by_tensor, _MOST_TENSORS // max(1, len(gradients.names)))
        self.hashes, self.buffers, self.state, self.averages = (LocalHashes(by_tensor) for _ in range(4))
        self._models: list[weakref.ref[torch.nn.Module]] = []
        # What has the model's buffers, kept as long as the optimizer: the names before them, and the module's mapping
        # of buffers with the names of those that are not persistent.
        self._owners: list[_Owner] = []
        # Copies of the model that no optimizer trains, such as averaged models.
        self._copies: list[weakref.ref[torch.nn.Module]] = []
        # Modules that no optimizer trains.
        self._untrained: list[weakref.ref[torch.nn.Module]] = []
        # A step whose weights should be hashed was profiled, so that the next one that is not has its place.
        self.is_hash_due = False
        self._named, self._warmup = named, record.warmup
        self._every = MOST_EVERY if record.hash_state else 0
        self.training = Training(named, random, self._every)
        self._prepared = prepared
        self._places: list[tuple[int, str]] = []
        self._values = Values()
        self._last_words: weakref.finalize[Any, Optimizer] | None = None
        # The groups of parameters that are hashed at the end.
        self.num_groups = 0

    @property
    def running(self) -> StepCounter | ScriptCapture | None:
        """The count or the profile of the step that has begun."""
        begun = self._begun
        return begun if begun is not None and begun.is_running else None

    def note_step(self, other: Optimized) -> None:
        """Note a step of any optimizer, which is a part of this one's step; end a profile that would not end."""
        running = self.running
        if running is not None and running is self.counter:
            self.counted_with.add(other)
        self._num_within = 0 if other is self else self._num_within + 1
        if self._num_within <= MOST_WITHIN or running is None:
            return
        running.end()
        running.problem = f"in one profiled step, other optimizers made more than {MOST_WITHIN} steps"
        if running is self.counter:
            self.counter = None
            self.counted_with.clear()

    def end_profile(self) -> None:
        """End the profile of steps, or the count of one, if it runs."""
        if (running := self.running) is not None:
            running.end()

    def give_way(self) -> None:
        """End the profile of steps, or the count of one, for a profiler of the script."""
        if (running := self.running) is not None:
            running.give_way()
            running.end()

    def profile(self) -> Profile:
        """Return the overlap of the profiled steps, or how many steps the script lacks for them."""
        capture = self.capture or ScriptCapture(self.timer.device)
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
        if (running := self.running) is not None:
            running.boundary()
        for quantity, value in values:
            self._places.append((self.num_steps, quantity))
            self._values.add(copied(value) if isinstance(value, torch.Tensor) else value)

    def begin_step(self, may_profile: Callable[[], bool], is_covered: Callable[[Optimized], bool]) -> bool:
        """Begin the next step, and return whether it is profiled; the warm-up comes after the first step.

        ``may_profile`` returns whether a profiler may begin here, ``is_covered`` whether a step was counted with a step
        of this optimizer in it.
        """
        left = self._warmup - self.num_steps + 1
        self._is_count_due = self._is_count_due or left == STEPS_TO_COUNT
        if self.running is not None:
            self._profiled_until = self.num_steps + 1
            return True
        # A step that is not timed follows, so that the timed steps begin without the profiler's end.
        if self.num_steps == self._profiled_until:
            return False
        is_capture_due = self.timer.num_steps >= TIMED_STEPS and (self.capture is None or self.capture.is_open)
        if is_capture_due and may_profile():
            self._begun = self.capture = self.capture or ScriptCapture(self.timer.device, self._prepared)
        elif self._is_count_due and may_profile() and not is_covered(self):
            self._is_count_due = False
            self._begun = self.counter = StepCounter(self.timer.device, self._prepared)
        else:
            if left <= 0:
                self.timer.open()
            return False
        self._begun.begin()
        self._profiled_until = self.num_steps + 1
        return self._begun.is_running

    def belongs_to(
        self,
        roots: Iterable[torch.nn.Module],
        named: Iterable[NamedTensor],
        *,
        hash_buffers: bool,
    ) -> None:
        """Take the names and the buffers of those modules that have the ``named`` parameters of the optimizer.

        Copies of these modules, such as averaged models, are hashed as buffers: nothing else shows another average.
        """
        places = {id(part): place for place, (_, part) in enumerate(named)}
        firsts = (
            (min((places.get(id(part), len(places)) for part in root.parameters()), default=len(places)), root)
            for root in roots
        )
        # Modules are found in any order.
        own = [root for first, root in sorted(firsts, key=lambda one: (one[0], _title(one[1]))) if first < len(places)]
        self.model = " + ".join(dict.fromkeys(map(_title, own)))[:_LONGEST_NAME]
        self._models = list(map(weakref.ref, own))
        self._owners = [
            (f"{name}." if name else "", *buffers_of(module))
            for root in own
            for name, module in root.named_modules()
            if hash_buffers
        ]
        if self._every:
            self._untrained = list(map(weakref.ref, _untrained(roots)))
        elif hash_buffers:
            self._copies = list(map(weakref.ref, _copies(own, roots)))

    def _of_copies(self) -> Iterator[_Owner]:
        """Yield what has the parameters and buffers of copies of the model that still exist."""
        if self._copies:
            # Whether a copy that the script has dropped exists must not depend on when the collector runs.
            gc.collect()
        for copy in filter(None, (known() for known in self._copies)):
            yield "", dict(torch.nn.Module.named_parameters(copy, _title(copy), remove_duplicate=False)), ()
            for name, module in copy.named_modules(prefix=_title(copy)):
                yield f"{name}.", *buffers_of(module)

    def models(self) -> list[torch.nn.Module]:
        """Return the largest modules that have the parameters."""
        return [model for known in self._models if (model := known()) is not None]

    def look(self) -> None:
        """Note what the modules drop and train from the next step on."""
        if (optimizer := self.optimizer()) is not None:
            parameters = [part for _, part in self._named(optimizer)]
            self.training.look(self.num_steps + 1, self.models(), parameters)

    def hash(self, *, is_last: bool = False) -> None:
        """Hash this rank's parts of the parameters, and its buffers, after this step, unless that is done.

        The hash of the last step has what the script did to them after it, whichever steps are hashed.
        """
        if (optimizer := self.optimizer()) is not None:
            self._hash(self._named(optimizer), [*self._owners, *self._of_copies()], again=is_last)

    def _hash(self, named: Iterable[NamedTensor], owners: Iterable[_Owner], *, again: bool) -> None:
        self.hashes.add(self.num_steps, named, again=again)
        buffers = [
            (before + key, buffer)
            for before, own, left_out in owners
            for key, buffer in own.items()
            if buffer is not None and key not in left_out
        ]
        self.buffers.add(self.num_steps, buffers, again=again)

    def hash_state(self) -> None:
        """Hash what else the next step goes on from, before the optimizer makes it, if that is asked for."""
        if (optimizer := self.optimizer()) is not None:
            self._hash_state(self._named(optimizer), optimizer.state)

    def _hash_state(self, named: Sequence[NamedTensor], held_by: Mapping[torch.Tensor, Any]) -> None:
        if self.num_steps > self._every or not self._every:
            return
        names = {id(part): logical_name(name) for name, part in named}
        state = [(names.get(id(part), ""), held) for part, held in held_by.items()]
        models = [model for known in self._untrained if (model := known()) is not None]
        averages = [(type(model).__name__, model.state_dict()) for model in models]
        for hashes, holders in ((self.state, state), (self.averages, averages)):
            held = [(f"{name}.{key}", value) for name, values in holders for key, value in values.items()]
            tensors = [(name, torch.as_tensor(value)) for name, value in held if isinstance(value, _HASHED)]
            hashes.add(self.num_steps, tensors)

    def hash_at_the_end(self) -> None:
        """Have parameters and state hashed when the optimizer is freed, in case the script drops it with the model."""
        if (optimizer := self.optimizer()) is None:
            return
        if self._last_words is not None:
            self._last_words.detach()
        # The optimizer keeps the tensors alive itself, and these are dropped with it.
        named, self.num_groups = self._named(optimizer), len(optimizer.param_groups)
        self._last_words = weakref.finalize(optimizer, self._hash_freed, named, optimizer.state)
        self._last_words.atexit = False

    def _hash_freed(self, named: Sequence[NamedTensor], state: Mapping[torch.Tensor, Any]) -> None:
        # The collector may free an optimizer while torch traces with fake tensors.
        with disable_current_modes():
            # Which copies are dropped before the optimizer is chance.
            self._hash(named, self._owners, again=True)
            self._hash_state(named, state)
        self._owners.clear()

    def stop(self) -> None:
        """End a profile that runs, and no longer wait for the optimizer's end."""
        self.end_profile()
        if self._last_words is not None:
            self._last_words.detach()

    def values(self) -> dict[str, dict[int, float]]:
        """Return the quantities by step: the sum of the micro-batches' losses, and the norm of all gradients.

        A norm that is not finite, with a loss after it, is of an iteration whose step a ``GradScaler`` has skipped.
        """
        steps: dict[int, list[tuple[str, float]]] = {}
        for (step, quantity), value in zip(self._places, self._values.read(), strict=True):
            found = steps.setdefault(step, [])
            if quantity == LOSS and any(name == NORM and not math.isfinite(norm) for name, norm in found):
                found.clear()
            found.append((quantity, value))
        by_step: dict[str, dict[int, float]] = {LOSS: {}, NORM: {}}
        for step, found in steps.items():
            losses, norms = ([value for name, value in found if name == kind] for kind in (LOSS, NORM))
            if losses:
                by_step[LOSS][step] = sum(losses)
            if norms:
                by_step[NORM][step] = norms[0] if len(norms) == 1 else math.hypot(*norms)
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
            loss={str(step): value for step, value in values[LOSS].items()},
            grad_norm={str(step): value for step, value in values[NORM].items()},
            weights=self.hashes.digests(),
            buffers=self.buffers.digests(),
            state=self.state.digests(),
            averages=self.averages.digests(),
            gradients=self._gradients.by_step() if self._gradients else {},
            turns=[] if is_alone else self.turns,
            settings=self.training.settings(),
            samples=self.training.samples(),
        )

    @property
    def calls(self) -> float | None:
        """The number of collectives in a timed step; None without one."""
        return calls_by_step(self.timer.spans_ns)


def _copies(own: Sequence[torch.nn.Module], roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return copies of the modules that an optimizer has, such as averaged models, in any order."""
    shapes = [[part.shape for part in module.parameters()] for module in own]
    alike = [root for root in roots if root not in own and [part.shape for part in root.parameters()] in shapes]
    return _untrained(alike) if alike else []


def _untrained(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those modules none of whose parameters an optimizer has."""
    trained = {id(part) for optimizer in optimizers() for part in parts_of(optimizer)}
    return [one for one in modules if not any(id(part) in trained for part in one.parameters())]


def own_value(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without an operator that autograd or a profile would see."""
    if type(value) is torch.Tensor:
        return value
    with torch.no_grad():
        return local_part(value)


def copied(own: torch.Tensor) -> float | torch.Tensor:
    """Return a copy of a tensor with one element, since the script may write into its memory; a number on CPU."""
    return float(own.item()) if own.is_cpu else own.detach().reshape(1).to(torch.float64, copy=True)


def _title(module: torch.nn.Module) -> str:
    """Return the class of a module such as ``DDP(Net)``: wrappers of torch are followed by what they wrap."""
    name = type(module).__name__
    children = list(module.children())
    return f"{_SHORT_NAMES[name]}({_title(children[0])})" if name in _SHORT_NAMES and len(children) == 1 else name
