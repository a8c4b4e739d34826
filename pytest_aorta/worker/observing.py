"""Observation of an unedited training script: the steps, losses, gradient norms and weights of each optimizer.

Torch has public hooks for the steps of optimizers. Functions that have no hook are replaced; :meth:`Observer.start`
lists them.

Nothing here is collective, since ranks may not all arrive: each rank records what it has, and the records of all ranks
are joined when they have ended. Nothing reads a number from a device before the script has ended.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from traceback import walk_stack
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_aorta.common.clock import time
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.profiled_steps import Costs, Profile, joined_costs
from pytest_aorta.worker.absence import Absence
from pytest_aorta.worker.accelerator import memory_in_use, own_device
from pytest_aorta.worker.costs import NOT_COUNTED, StepCounter
from pytest_aorta.worker.finite import MOST_SEARCHED, Optimizers, freeze, refuse_values, roots, untraced
from pytest_aorta.worker.optimized import (
    LOSS,
    MOST_EVERY,
    MOST_WITHIN,
    NORM,
    Gradients,
    Optimized,
    copied,
    own_value,
)
from pytest_aorta.worker.recorded import Recorded
from pytest_aorta.worker.replacing import replace
from pytest_aorta.worker.simulation import is_simulated, note_padded
from pytest_aorta.worker.steps import Progress
from pytest_aorta.worker.torch_private import (
    SAVE_STATE_DICT,
    STEP_OPTIMIZER,
    BaseDataLoaderIter,
    FakeTensor,
    autocast_of,
    dcp_saver,
    makes_state_alone,
    sampler_of,
)
from pytest_aorta.worker.training import Inputs, random_state, tensors_in

# Checks of all parameters take at most this part of the time, beside those after steps 1, 2, 4, 8 and so on.
_CHECKING = 0.002
_NO_STEP = "the script steps no optimizer, so it has no step whose costs could be counted"
# Loaders whose last batch is kept until the end of the step.
_MOST_LOADERS = 4
# Steps after which a script has saved that are kept.
_MOST_SAVED = 100
# Steps of a loop without an optimizer, whose trace has to be read as a whole.
_MOST_COUNTED_WHOLE = 100
_NOT_COUNTED_WHOLE = (
    f"the steps are those of no optimizer, so run() is counted as a whole: give the config key steps, at most "
    f"{_MOST_COUNTED_WHOLE}"
)


class Observer:
    """Recorder of all optimizers that step in this process, from :meth:`start` to :meth:`stop`.

    Attributes:
        record: How steps are recorded. Weights are this rank's parts of the parameters; they are hashed before the
            first step, after steps 1, 2, 4, 8 and so on, and after the last one; in place of a profiled step, after
            the next one that is not.
        is_asked: Whether the script has asked for the observation.
        optimizers: The optimizers that have stepped.
        device: The device of the steps; the CPU before the first step.
    """

    unit = "step"
    end_together = False

    def __init__(self) -> None:
        self.record = StepRecording()
        self.is_asked = False
        self.optimizers = Optimizers()
        self.device = torch.device("cpu")
        self._inputs = Inputs()
        # The state of torch's random numbers when the first optimizer was made.
        self._random = ""
        self._absence = Absence()
        self._began_s = time.perf_counter()
        self._all: list[Optimized] = []
        self._by_id: dict[int, Optimized] = {}
        self._progress: Progress | None = None
        # Losses and norms of the step that runs.
        self._values: list[tuple[str, float | torch.Tensor]] = []
        # What a scaler has returned, for what it was given, until the next backward pass.
        self._scaled: tuple[object, object] = None, None
        # Optimizers that were made since the last backward pass; their gradients are watched from their first step on.
        self._unwatched: list[weakref.ref[Optimizer]] = []
        self._gradients: weakref.WeakKeyDictionary[Optimizer, Gradients] = weakref.WeakKeyDictionary()
        self._stepping: list[Optimizer] = []
        # Whether the step that runs only creates state.
        self._is_no_step = False
        self._stepped_within: list[Optimizer] = []
        self._is_in_backward = self._is_counting = self._is_stopped = False
        self._turn = 0
        # The optimizer whose step ended the last profile, with its steps and the turn until then.
        self._profiled_last: tuple[Optimized, int, int] | None = None
        # The profilers of the script that have been prepared, by id; they do not run yet.
        self._prepared: set[int] = set()
        self._whole: StepCounter | None = None
        self._is_simulated = is_simulated()
        # Steps after which the script saved -> milliseconds that this took.
        self._saved: dict[int, float] = {}
        self._is_saving = False
        self._looked_s = self._look_s = 0.0
        self._undo: list[Callable[[], object]] = []

    def start(self) -> Observer:
        """Observe from now on."""
        if not self._undo:
            begin, end = map(untraced, (self._begin, self._end))
            pre, post = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
            self._undo += [pre.remove, post.remove]
            for owner, name, around in (
                (torch.autograd, "backward", self._backward),  # Tensor.backward calls it too
                (torch.nn.utils, "clip_grad_norm_", self._clip),
                (torch.nn.utils.clip_grad, "clip_grad_norm_", self._clip),
                (torch.amp.GradScaler, "scale", self._scale),
                (Optimizer, "__init__", self._made),
                (torch, "load", self._load),
                (torch, "save", self._save),
                (BaseDataLoaderIter, "__next__", self._draw),
                (torch.autocast, "__enter__", self._cast),
                (gc, "freeze", freeze),
                (torch.profiler.profile, "prepare_trace", self._give_way),
                (torch.profiler.profile, "stop_trace", self._may_resume),
            ):
                self._undo.append(replace(owner, name, around))
            if self.record.hash_state:
                hooks = torch.nn.modules.module
                self._undo.append(hooks.register_module_forward_pre_hook(self._give).remove)
        return self

    def stop(self) -> None:
        """Undo :meth:`start`, and end a profile that runs."""
        for one in self._all:
            one.stop()
        while self._undo:
            self._undo.pop()()

    def _end_step(self, optimizer: Optimizer) -> None:
        """End a step of an optimizer, and begin the next one.

        This runs once in each step of the script, between its end and the begin of the next one, so that the order
        matters: what the recorder computes must count neither in times nor in costs, and a profiler that ends here
        must not be followed by another one, since the optimizer's step is a scope that ends after its hooks.
        """
        if (found := self._find(optimizer)) is None:
            return
        # Profiles end first. Optimizers that take turns, as those of a GAN, are in one step, also a profiled one.
        was_counting = self._is_counting
        if was_counting:
            for one in self._all:
                one.note_step(found)
        found.end_step(self._values)
        self._values = []
        # A closure of the optimizer has computed the gradients within its step.
        models, may_sample = found.models(), not was_counting
        found.training.note_step(found.num_steps, optimizer, models, self._inputs, may_sample=may_sample)
        self._inputs = Inputs()
        self._is_counting = was_counting and any(one.running for one in self._all)
        self._turn += 1
        if was_counting and not self._is_counting:
            self._profiled_last = found, found.num_steps, self._turn

        # The progress that other processes read is the number of the iteration: the least number of steps among the
        # optimizers that have stepped since this one's last step.
        before = found.turns[-1] if found.turns else 0
        found.turns.append(self._turn)
        is_alone = len(self._all) == 1
        since = (one.num_steps for one in self._all if one.turns and one.turns[-1] > before)
        self._enter(1 + (found.num_steps if is_alone else min(since)))

        # Then the recorder computes, with all timers paused; within a profiled step it waits for the next step.
        is_chosen = self._is_hashed(found.num_steps) or found.is_hash_due
        found.is_hash_due = is_chosen and self._is_counting
        is_look_due = time.perf_counter() - self._looked_s > self._look_s / _CHECKING
        if (is_chosen or is_look_due) and not (self._is_counting or self._is_simulated):
            with ExitStack() as paused:
                for one in self._all:
                    paused.enter_context(one.timer.paused())
                self._look(found)
                if is_chosen and self.record.hash_weights:
                    found.hash()
        has_new_groups = found.num_groups < len(optimizer.param_groups)
        if (is_chosen or has_new_groups) and self.record.hash_weights and not self._is_simulated:
            found.hash_at_the_end()

        # The next step begins last.
        self._is_counting = found.begin_step(self._may_profile, self._is_covered) or self._is_counting

    def _may_profile(self) -> bool:
        """Return whether no profile runs, and an iteration lies between the last profile and now.

        So every scope that was entered under the last profiler has been left; see :class:`ScriptProfiler`.
        """
        if self._is_counting or self.record.hash_every_step:
            return False
        if self._profiled_last is None:
            return True
        last, num_steps, turn = self._profiled_last
        return last.num_steps > num_steps or self._turn - turn > MOST_WITHIN

    def _is_covered(self, found: Optimized) -> bool:
        """Return whether the costs of an optimizer's step are not counted again, since they are in a step that was."""
        counted = [one for one in self._all if one.counter is not None]
        return len(counted) >= MOST_SEARCHED or any(found in one.counted_with for one in counted)

    def _begin(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # The step of an optimizer that has raised has no end.
        if self._stepping and (num_running := _num_running_steps()):
            del self._stepping[num_running - 1 :]
        self._stepping.append(optimizer)
        # The weights before the first step show which ranks hold replicas, before each trains on its own data.
        if len(self._stepping) > 1:
            return
        self._is_no_step = makes_state_alone(optimizer)
        if self._is_no_step:
            return
        if (found := self._find(optimizer)) is None:
            found = self._new(optimizer)
            if self.record.hash_weights and not (self._is_counting or self._is_simulated):
                found.hash()
        if self.record.hash_state:
            # A checkpoint and averaged models are written after the optimizer's step.
            found.hash_state()
        if 0 < self.record.stop_after == found.num_steps:
            self._is_stopped = True
            for one in self._all:
                one.stop()
            raise SystemExit(0)

    def _is_hashed(self, step: int) -> bool:
        return step.bit_count() == 1 or (self.record.hash_every_step and step <= MOST_EVERY)

    def _end(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """End a step of an optimizer and begin the next, unless the optimizer is a part of another one that steps."""
        if self._stepping:
            self._stepping.pop()
        if self._stepping or self._is_no_step:
            return
        if self._is_in_backward:
            # Where a hook of each gradient steps an optimizer; a profiler that begins there would end with the hook.
            self._stepped_within.append(optimizer)
        else:
            self._end_step(optimizer)

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
                self._note(LOSS, loss if scaled is not None and scaled is one else one)
        for one in self._all if not self._inputs.num_backward else ():
            if (optimizer := one.optimizer()) is not None:
                one.training.note_gradients(one.num_steps + 1, optimizer)
        self._inputs.num_backward += 1
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
        self._inputs.scaler = scaler
        self._scaled = scaled, outputs
        return scaled

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        num_noted = len(self._values)
        norm = original(*args, **kwargs)
        # Torch's function gets the parameters first, that of FSDP1 the module.
        limit = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
        self._inputs.clipped_to = float(limit) if isinstance(limit, int | float) else None
        # FSDP1's function calls torch's, where parameters are not sharded.
        del self._values[num_noted:]
        self._note(NORM, norm)
        return norm

    def _note(self, quantity: str, value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or self._is_simulated:
            return
        own = own_value(value)
        # A program tries a kernel or estimates memory before it trains.
        if not (own.is_meta or isinstance(own, FakeTensor)):
            # What the recorder does must not count among the costs of a step, so there the copy is made after the step.
            self._values.append((quantity, own if self._is_counting else copied(own)))

    def _draw(self, original: Callable[..., Any], loader: object) -> Any:
        batch = original(loader)
        # A script evaluates with other samples, and need not keep those it trains with until then.
        if torch.is_grad_enabled():
            sampler, batches = sampler_of(loader), self._inputs.batches
            batches.pop(id(sampler), None)
            batches[id(sampler)] = sampler, batch
            if len(batches) > _MOST_LOADERS:
                del batches[next(iter(batches))]
        return batch

    def _give(self, _module: torch.nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling() or self._inputs.given or self._inputs.num_backward:
            return
        if torch.is_grad_enabled():
            # What has a gradient was computed by another module.
            self._inputs.given = [part for part in tensors_in(inputs) if not part.requires_grad]

    def _cast(self, original: Callable[..., Any], entered: torch.autocast) -> Any:
        self._inputs.autocast = autocast_of(entered)
        return original(entered)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._absence.has_loaded = True
        return original(*args, **kwargs)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, began_s = self.num_steps, time.perf_counter()
        if len(self._saved) < _MOST_SAVED:
            self._saved.setdefault(step, 0.0)
        # A distributed checkpoint saves its tensors by torch.save, on several threads.
        if self._is_saving or step not in self._saved:
            return original(*args, **kwargs)
        self._is_saving = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_saving = False
            self._saved[step] += 1e3 * (time.perf_counter() - began_s)

    def _made(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self._absence.has_optimizer:
            if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
                self._undo.append(replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", self._clip))
            if (saver := dcp_saver()) is not None:
                self._undo.append(replace(saver, SAVE_STATE_DICT, self._save))
            self._random = random_state()
        self._absence.has_optimizer = True
        original(*args, **kwargs)
        if self.record.hash_every_step and not self._is_simulated:
            self._unwatched.append(weakref.ref(args[0]))

    def _watch_gradients(self) -> None:
        while self._unwatched:
            if (optimizer := self._unwatched.pop()()) is not None:
                self._gradients[optimizer] = Gradients(optimizer)

    def _give_way(self, original: Callable[..., Any], profiler: torch.profiler.profile) -> Any:
        for one in self._all:
            one.give_way()
        self._prepared.add(id(profiler))
        return original(profiler)

    def _may_resume(self, original: Callable[..., Any], profiler: torch.profiler.profile) -> Any:
        self._prepared.discard(id(profiler))
        return original(profiler)

    def _enter(self, step: int) -> None:
        self._progress = self._progress or Progress()
        self._progress.enter(step)

    def _find(self, optimizer: Optimizer) -> Optimized | None:
        # Another optimizer may have the id of one that was freed.
        found = self._by_id.get(id(optimizer))
        return found if found is not None and found.optimizer() is optimizer else None

    def _new(self, optimizer: Optimizer) -> Optimized:
        if not self._all:
            self.device = own_device()
        self.optimizers.add(optimizer)
        self._watch_gradients()
        inside = roots() if len(self._all) < MOST_SEARCHED else None
        named, gradients = self.optimizers.named, self._gradients.get(optimizer)
        own = named(optimizer, inside=inside)
        if self._is_simulated:
            note_padded(own)
        found = Optimized(optimizer, named, self.device, self.record, gradients, self._prepared, self._random)
        self._all.append(found)
        self._by_id[id(optimizer)] = found
        if inside is not None:
            found.belongs_to(inside, own, hash_buffers=self.record.hash_weights)
        found.look()
        return found

    def _look(self, found: Optimized) -> None:
        began_s = time.perf_counter()
        self.optimizers.look(found.num_steps, f"step {found.num_steps}")
        found.look()
        self._looked_s = time.perf_counter()
        self._look_s = self._looked_s - began_s

    @property
    def num_steps(self) -> int:
        """The largest number of steps of an optimizer."""
        return max((one.num_steps for one in self._all), default=0)

    @contextmanager
    def counted_whole(self, num_steps: object) -> Iterator[None]:
        """Count the body, a loop of steps by no optimizer, as one step; the trace of a long loop would be too large."""
        is_short = isinstance(num_steps, int) and num_steps <= _MOST_COUNTED_WHOLE
        if self._absence.has_optimizer or not is_short:
            yield
            return
        self._whole = StepCounter(own_device(), self._prepared)
        with self._whole.step(locates=False):
            yield

    def refuse(self) -> None:
        """Check the losses, the gradient norms, and the parameters after steps."""
        for one in self._all:
            found = [(step, name, value) for name, by_step in one.values().items() for step, value in by_step.items()]
            refuse_values(found, f"step {{}} of {one.num_steps}", self.optimizers)
        self.optimizers.refuse()

    def result(self, recorded: Recorded, *, has_own_steps: bool = False) -> RankResult:
        """Return everything recorded, with the times of the main optimizer.

        ``has_own_steps`` is whether the caller knows the times of the steps.
        """
        self._end_all()
        main = self._main
        if has_own_steps and (main is None or self._whole is not None):
            if self._whole is not None:
                return self._as_one_step(recorded, self._whole.costs()).with_profile(self._whole.overlap())
            problem = NOT_COUNTED if self._absence.has_optimizer else _NOT_COUNTED_WHOLE
            return self._as_one_step(recorded, Costs(problem=problem))
        if main is None and self._absence.is_without_training:
            return self._as_one_step(recorded, Costs(problem=_NO_STEP))
        if main is None:
            raise RuntimeError(
                f"the script recorded no step: {self._absence.cause(self.num_steps, self.record.warmup)}"
            )
        result = recorded.timed(main.timer, self._began_s, self._costs())
        # The first step of an optimizer may have raised.
        stepped = [one for one in self._all if one.num_steps]
        # Values that the script itself records after each step are those of all steps; it may be ended within one.
        loss, grad_norm = (
            [values[step - 1] for step in main.timed] if len(values) == main.num_steps else values
            for values in ((result.loss, result.grad_norm) if not self.record.hash_state else ([], []))
        )
        saving_ms = list(filter(None, self._saved.values()))
        saved = {"checkpoint_ms": median(saving_ms)} if saving_ms else {}
        return result.replace(
            outside=result.outside | saved,
            loss=loss,
            grad_norm=grad_norm,
            series=[
                one.series(is_main=one is main, is_alone=len(stepped) == 1).replace(saved=[*self._saved])
                for one in stepped
            ],
        ).with_profile(Profile() if self._is_simulated else main.profile())

    def _as_one_step(self, recorded: Recorded, costs: Costs) -> RankResult:
        """Return the measurements of a script that trains nothing, as one step: its wall time and its memory."""
        device, wall_s = own_device(), time.perf_counter() - self._began_s
        result = recorded.result(RankResult.of_steps([1000 * wall_s], wall_s), device, costs)
        return result.replace(memory_bytes=[memory_in_use(device)])

    @property
    def _main(self) -> Optimized | None:
        """The optimizer with most steps, among those whose timed steps have collectives if there are any."""
        timed = [one for one in self._all if one.timer.num_steps]
        return max(timed, key=lambda one: (bool(one.calls), one.num_steps), default=None)

    def _costs(self) -> Costs:
        """Return the costs of steps that have every optimizer's step in them, added up.

        The step of an optimizer that takes turns with others has their steps in it, as that of a GAN's generator.
        """
        parts: list[Costs] = []
        covered: set[Optimized] = set()
        counted = [(one, one.counter) for one in self._all if one.counter is not None]
        for one, counter in sorted(counted, key=lambda entry: -len(entry[0].counted_with)):
            if one not in covered:
                covered |= one.counted_with
                parts.append(counter.costs())
        return joined_costs(parts) if parts else Costs(problem=NOT_COUNTED)

    def _end_all(self) -> None:
        """Look at the parameters and hash them once more, where the optimizers still exist; after the script."""
        for one in self._all:
            one.end_profile()
            if one.optimizer() is not None and not self._is_simulated:
                self.optimizers.look(one.num_steps, f"step {one.num_steps}")
                # A step that was not ended has changed buffers.
                if self.record.hash_weights and not self._is_stopped:
                    one.hash(is_last=True)
                    one.hash_state()


def _num_running_steps() -> int:
    """Return how many optimizers' steps have begun, each called by the one before; 0 where they are compiled."""
    return sum(frame.f_code is STEP_OPTIMIZER for frame, _ in walk_stack(sys._getframe()))
