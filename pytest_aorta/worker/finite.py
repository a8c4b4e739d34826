"""Refusal of NaN and infinite values: losses, gradient norms, metrics, and parameters after each step."""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.layout import local_part

# torch.isfinite supports these types on every device.
_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# Types of 8 bits that torch.isfinite does not support, and whose numbers bfloat16 represents exactly.
_CHECKED_AS_BFLOAT16 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Optimizers:
    """The optimizers that have stepped, and the parameters of theirs that were not finite after a step.

    What is read of the parameters stays on the device until the end: reading a number would make the step wait.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        self._num_steps = self._num_looks = 0
        self._is_recorded = self._is_following = False
        # Id of a parameter -> its name in the largest module that has it, or else its place in the optimizer.
        self._names: dict[int, str] = {}
        # Looks that were not read: names of parameters of one device and type, with the largest magnitude of each.
        self._looks: list[tuple[int, list[str], torch.Tensor]] = []

    def follow(self, *, is_recorded: bool) -> None:
        """Learn of each optimizer that steps from now on; ``is_recorded`` if :meth:`look` is called after steps."""
        if is_recorded and not self._is_recorded:
            self._looks, self._num_looks = [], 0
        self._is_recorded = self._is_recorded or is_recorded
        if not self._is_following:
            register_optimizer_step_post_hook(self._note)
        self._is_following = True

    def _note(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if all(known() is not optimizer for known in self._known):
            self._known.append(weakref.ref(optimizer))
        self._num_steps += 1
        # Nothing is recorded where a log is read. A look at powers of two costs little of the times in the log.
        if not self._is_recorded and self._num_steps.bit_count() == 1:
            self.look()

    def named(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters of the optimizers that exist."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for optimizer in filter(None, (known() for known in self._known)):
            for number, group in enumerate(optimizer.param_groups):
                found |= {id(part): (f"{number}.{place}", part) for place, part in enumerate(group["params"])}
        if found.keys() - self._names.keys():
            self._names = {key: place for key, (place, _) in found.items()} | _names_in_modules(found.keys())
        return ((self._names[key], part) for key, (_, part) in found.items())

    def look(self) -> None:
        """Look at the parameters after a step."""
        self._num_looks += 1
        alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, part in _checked_parts(self.named()):
            if part.dtype in _CHECKED:
                alike.setdefault((part.device, part.dtype), {})[name] = part
        for parts in alike.values():
            largest = torch.stack(torch._foreach_norm([*parts.values()], math.inf))
            self._looks.append((self._num_looks, list(parts), largest))

    def refuse(self, rank: int, num_measured: int) -> None:
        """Check all looks that were not checked before.

        Raises:
            NotFinite: A parameter was NaN or infinite.
        """
        for look, names, largest in self._looks:
            bad = [name for name, is_finite in zip(names, largest.isfinite().tolist(), strict=True) if not is_finite]
            if bad:
                step = look - (self._num_looks - num_measured) if self._is_recorded else 2 ** (look - 1)
                when = f"measured step {step}" if step > 0 else f"step {look}, a warm-up step"
                others = f" (and {len(bad) - 1} others)" if len(bad) > 1 else ""
                raise NotFinite(
                    f"parameter {bad[0]}{others} of rank {rank} is NaN or infinite first after {when}; look at the "
                    f"learning rate and the gradients of the steps before"
                )
        self._looks = []


def _names_in_modules(parameters: Set[int]) -> dict[int, str]:
    """Return the names of parameters, by their ids, in the largest modules of the script that have them."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    named = [(name, id(own)) for found in modules for name, own in found.named_parameters() if id(own) in parameters]
    return {key: name for name, key in sorted(named, key=lambda pair: len(pair[0]))}


class NotFinite(ArithmeticError):
    """A NaN or infinite value; the message names the quantity, the rank and the first step."""


def refuse_series(name: str, values: Sequence[float], rank: int, num_steps: int) -> None:
    """Check a quantity with one value per measured step, or per recorded step if there are fewer values.

    Raises:
        NotFinite: A value is NaN or infinite.
    """
    unit = "measured step" if len(values) == num_steps else "recorded value"
    for number, value in enumerate(values, 1):
        if not math.isfinite(value):
            raise NotFinite(
                f"{name} of rank {rank} is {value} first in {unit} {number} of {len(values)}; such a run measures "
                f"nothing: look at the learning rate, the data and the loss scale of the steps before"
            )


def refuse_non_finite(result: RankResult) -> None:
    """Check the numbers that a workload or script computed.

    Raises:
        NotFinite: A loss, gradient norm or metric is NaN or infinite; the message names the rank and the first step.
    """
    rank, num_steps = int(os.environ["RANK"]), len(result.step_times_ms)
    refuse_series("loss", result.loss, rank, num_steps)
    refuse_series("gradient norm", result.grad_norm, rank, num_steps)
    for name, value in result.metrics.items():
        if not math.isfinite(value):
            raise NotFinite(f"metric {name} of rank {rank} is {value}; record a finite number, or no such metric")


def refuse_parameters(named: Iterable[tuple[str, torch.Tensor]], rank: int, when: str) -> None:
    """Check this rank's part of each parameter; not collective. ``when`` is the time of the check, for the message.

    Raises:
        NotFinite: An element is NaN or infinite.
    """
    checked = list(_checked_parts(named))
    if not checked:
        return
    # Read from the device once, not once per parameter.
    device = checked[0][1].device
    are_finite = torch.stack([_is_finite(part).all().to(device) for _, part in checked]).tolist()
    for (name, part), is_finite in zip(checked, are_finite, strict=True):
        if not is_finite:
            count = int((~_is_finite(part)).sum())
            raise NotFinite(
                f"parameter {name} of rank {rank} has {count} of {part.numel()} elements that are NaN or infinite "
                f"{when}; look at the learning rate and the gradients of the steps before"
            )


def _checked_parts(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return this rank's part of each parameter that has data and can be NaN."""
    for name, tensor in named:
        if not (tensor.is_meta or is_lazy(tensor)):
            part = local_part(tensor.detach())
            if part.dtype in (*_CHECKED, *_CHECKED_AS_BFLOAT16) and part.numel():
                yield name, part


def _is_finite(part: torch.Tensor) -> torch.Tensor:
    return (part.to(torch.bfloat16) if part.dtype in _CHECKED_AS_BFLOAT16 else part).isfinite()
