"""Refusal of NaN and infinite values: losses, gradient norms, metrics, and parameters after each step."""

import gc
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from pytest_aorta.common.text import distinct
from pytest_aorta.result.evidence import FirstNotFinite
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.layout import NamedTensor, local_part
from pytest_aorta.worker.torch_private import disable_dynamo, foreach_norm

# torch.isfinite supports these types on every device.
CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# Types of 8 bits that torch.isfinite does not support, and whose numbers bfloat16 represents exactly.
_CHECKED_AS_BFLOAT16 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

# Of a script that makes optimizers in each step, those whose modules are searched for and whose costs are counted;
# either can take 100 ms.
MOST_SEARCHED = 16
# The modules that the script has frozen, and the roots that were found last.
_frozen: list[weakref.ref[torch.nn.Module]] = []
_roots: list[weakref.ref[torch.nn.Module]] = []

_Result = TypeVar("_Result")


def untraced(hook: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a hook that breaks the graph of a compiled step, which would else be compiled in every step.

    ``torch.compiler.disable`` would import the compiler at once. With this function, which torch's own optimizers use,
    the first call does so, when the first optimizer has imported it.
    """

    @disable_dynamo
    def call(*arguments: Any) -> _Result:
        # A bound method can't have the attribute that torch sets.
        return hook(*arguments)

    return call


class Optimizers:
    """Optimizers, and the parameters of theirs that were not finite after a step.

    What is read of the parameters stays on the device until the end: reading a number would make the step wait.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        # The name of each parameter in the largest module that has it, or else its place in the optimizer.
        self._names = WeakTensorKeyDictionary()
        # The names of all parameters that modules had at the last search.
        self._inside = WeakTensorKeyDictionary()
        # Looks that were not read: step, when, and parameters' names of one device and type, with their magnitudes.
        self._looks: list[tuple[int, str, list[str], torch.Tensor]] = []

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters of this optimizer too; more than once is once."""
        if all(known() is not optimizer for known in self._known):
            self._known.append(weakref.ref(optimizer))

    def named(self, *only: torch.optim.Optimizer, inside: Sequence[torch.nn.Module] | None = None) -> list[NamedTensor]:
        """Return the parameters of some optimizers, or of all that exist, by names that differ.

        ``inside`` has the :func:`roots`, if the caller has searched for them already.
        """
        found: dict[int, NamedTensor] = {}
        for optimizer in only or filter(None, (known() for known in self._known)):
            for number, group in enumerate(optimizer.param_groups):
                found |= {id(part): (f"{number}.{place}", part) for place, part in enumerate(group["params"])}
        if any(part not in self._names for _, part in found.values()):
            if len(self._known) <= MOST_SEARCHED:
                self._inside = _names_in(roots() if inside is None else inside)
            for place, part in found.values():
                self._names[part] = self._inside.get(part, place)
        # Parameters of modules that are in no common module have the same names.
        names = distinct((self._names[part] for _, part in found.values()), " ({})")
        return [(name, part) for name, (_, part) in zip(names, found.values(), strict=True)]

    def look(self, step: int, when: str) -> None:
        """Look at the parameters after a step; ``when`` names the step."""
        alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, part in _checked_parts(self.named()):
            if part.dtype in CHECKED:
                alike.setdefault((part.device, part.dtype), {})[name] = part
        for parts in alike.values():
            largest = torch.stack(foreach_norm([*parts.values()], math.inf))
            self._looks.append((step, when, list(parts), largest))

    def refuse(self, before: float = math.inf) -> None:
        """Check the looks after the steps ``before`` a step that were not checked before.

        Raises:
            NotFinite: A parameter was NaN or infinite.
        """
        for step, when, names, largest in (look for look in self._looks if look[0] < before):
            bad = [name for name, is_finite in zip(names, largest.isfinite().tolist(), strict=True) if not is_finite]
            if bad:
                others = f" (and {len(bad) - 1} others)" if len(bad) > 1 else ""
                raise NotFinite(
                    f"parameter {bad[0]}{others} of rank {_rank()} is NaN or infinite first after {when}; look at the "
                    f"learning rate and the gradients of the steps before",
                    step or None,  # 0 is a warm-up step
                    is_after=True,
                )
        self._looks = [look for look in self._looks if look[0] >= before]


def _names_in(inside: Iterable[torch.nn.Module]) -> WeakTensorKeyDictionary:
    """Return the longest name of each parameter in the modules."""
    names = WeakTensorKeyDictionary()
    for name, own in (pair for found in inside for pair in found.named_parameters()):
        # Modules are found in any order.
        names[own] = max(name, names.get(own, ""), key=lambda one: (len(one), one))
    return names


def roots() -> list[torch.nn.Module]:
    """Return the modules of this process that are in no other module."""
    every = modules()
    children = {id(child) for module in every for child in module.children()}
    found = [module for module in every if id(module) not in children]
    _roots[:] = map(weakref.ref, found)
    return found


def roots_of(inner: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the roots that were found last; if one of these modules is not in them, those of now."""
    known = [root for root in (one() for one in _roots) if root is not None]
    return known if {*inner} <= {module for root in known for module in root.modules()} else roots()


def modules() -> list[torch.nn.Module]:
    """Return all modules of this process; the search takes a third of a second where no server has imported torch.

    Modules that the script has dropped do not count, whenever the collector would have run.
    """
    gc.collect()
    # isinstance would call code of objects such as weak proxies.
    listed = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    return [*filter(None, (known() for known in _frozen)), *listed]


def optimizers() -> list[torch.optim.Optimizer]:
    """Return all optimizers of this process."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]


def parts_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def freeze(original: Callable[[], None]) -> None:
    """Call ``gc.freeze`` for the script, and remember all modules, which the collector no longer lists then."""
    _frozen[:] = map(weakref.ref, modules())
    original()


class NotFinite(ArithmeticError):
    """A NaN or infinite value; the message names the quantity, the rank and the first step.

    Attributes:
        first: The step, if it is known.
    """

    def __init__(self, message: str, step: int | None = None, *, is_after: bool = False) -> None:
        super().__init__(message)
        self.first = None if step is None else FirstNotFinite(step, is_after)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def refuse_values(
    values: Iterable[tuple[int, str, float]],
    where: str,
    parameters: Optimizers | None = None,
    *,
    is_step: bool = True,
) -> None:
    """Check values of quantities, each with its step, and the ``parameters`` before the first step that has a bad one.

    ``where`` names a step, with ``{}`` in place of its number, or another value if ``is_step`` is False.

    Raises:
        NotFinite: A value is NaN or infinite.
    """
    bad = [entry for entry in values if not math.isfinite(entry[2])]
    if bad:
        # Of one step's quantities, the first is computed first.
        step, name, value = min(bad, key=lambda entry: entry[0])
        if parameters is not None:
            parameters.refuse(step)
        raise NotFinite(
            f"{name} of rank {_rank()} is {value} first in {where.format(step)}; such a run measures nothing: look at "
            f"the learning rate, the data and the loss scale of the steps before",
            step if is_step else None,
        )


def refuse_series(series: Mapping[str, Sequence[float]], num_steps: int, parameters: Optimizers | None = None) -> None:
    """Check quantities, in the order of a step, that have a value per measured step, or per recorded step if fewer.

    Raises:
        NotFinite: A value is NaN or infinite.
    """
    for is_measured, unit in ((True, "measured step"), (False, "recorded value")):
        chosen = [
            (number, name, value)
            for name, values in series.items()
            if (len(values) == num_steps) is is_measured
            for number, value in enumerate(values, 1)
        ]
        total = max((number for number, _, _ in chosen), default=0)
        refuse_values(chosen, f"{unit} {{}} of {total}", parameters if is_measured else None, is_step=is_measured)


def refuse_non_finite(result: RankResult) -> None:
    """Check the numbers that a workload or script computed.

    Raises:
        NotFinite: A loss, gradient norm or metric is NaN or infinite; the message names the rank and the first step.
    """
    refuse_series({"loss": result.loss, "gradient norm": result.grad_norm}, len(result.step_times_ms))
    for name, value in result.metrics.items():
        if not math.isfinite(value):
            raise NotFinite(f"metric {name} of rank {_rank()} is {value}; record a finite number, or no such metric")


def refuse_parameters(named: Iterable[NamedTensor], when: str) -> None:
    """Check this rank's part of each parameter; not collective. ``when`` is the time of the check, for the message.

    Raises:
        NotFinite: An element is NaN or infinite.
    """
    checked = list(_checked_parts(named))
    counts = [_num_not_finite(part).to(checked[0][1].device) for _, part in checked]
    # Read from the device once, not once per parameter.
    for (name, part), count in zip(checked, torch.stack(counts).tolist() if counts else (), strict=True):
        if count:
            raise NotFinite(
                f"parameter {name} of rank {_rank()} has {count} of {part.numel()} elements that are NaN or infinite "
                f"{when}; look at the learning rate and the gradients of the steps before"
            )


def _checked_parts(named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Return this rank's part of each parameter that has data and can be NaN."""
    for name, tensor in named:
        if not (tensor.is_meta or is_lazy(tensor)):
            part = local_part(tensor.detach())
            if part.dtype in (*CHECKED, *_CHECKED_AS_BFLOAT16) and part.numel():
                yield name, part


def _num_not_finite(part: torch.Tensor) -> torch.Tensor:
    values = part.to(torch.bfloat16) if part.dtype in _CHECKED_AS_BFLOAT16 else part
    return (~values.isfinite()).sum()
