"""Faults that tests plant to prove that checks find them; a default run has none."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate

from pytest_aorta.worker import Delay, OperatorCapture

from .gradients import own_shard
from .torch_private import FakeTensor, TorchDispatchMode, disable_current_modes

OPERATOR_OUTPUT, OPERATOR_INPUT, OPERATOR_NAN = "operator_output", "operator_input", "operator_nan"
BATCH_INTEGER, SWAPPED_BATCHES = "batch_integer", "swapped_batches"


@dataclass(frozen=True)
class Fault:
    """The block ``fault`` of a config; ``step`` counts measured steps from 1."""

    kind: str = "none"
    step: int = 1
    rank: int | None = 0
    operator: str = ""
    call: int = 1

    @property
    def slow_steps(self) -> tuple[float, int]:
        """Return the milliseconds that slow steps take longer, and their period."""
        return 0.0, 1

    def check(self, *, steps: int, world_size: int) -> None:
        """Raise ValueError if the fault could not happen in this run."""
        if self.kind != "none" and self.step > steps:
            raise ValueError(f"fault {self.kind!r} is at step {self.step} of {steps} measured steps")
        if self.kind != "none" and (self.rank or 0) >= world_size:
            raise ValueError(f"fault {self.kind!r} is on rank {self.rank}; ranks are 0..{world_size - 1}")
        if self.kind in (OPERATOR_OUTPUT, OPERATOR_INPUT, OPERATOR_NAN) and not self.operator:
            raise ValueError(f"fault {self.kind!r} names no operator; give its name, such as 'aten.mm.default'")


@dataclass(frozen=True)
class LlamaFault(Fault):
    """The block ``fault`` of a Llama workload."""

    delay_ms: float = 0.0
    every: int = 1

    @property
    def slow_steps(self) -> tuple[float, int]:
        """Return the milliseconds that slow steps take longer, and their period."""
        return self.delay_ms, self.every


class PlantedFault:
    """A :class:`Fault` around the steps, the batches and the model of a rank; training code does not know of faults."""

    def __init__(self, fault: Fault, rank: int, device: torch.device) -> None:
        """Prepare the fault; the delay of a slow step is calibrated on ``device``."""
        delay_ms, self._every = fault.slow_steps
        self._fault, self._delay = fault, Delay(device, delay_ms)
        self._is_here = fault.rank in (None, rank)
        # That of the measured step that runs.
        self._step = 0

    @contextmanager
    def in_step(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, capture: OperatorCapture | None = None
    ) -> Iterator[None]:
        """Plant the fault of a measured step in its operators, or after them; ``capture`` records them."""
        self._step = step
        # The capture is entered between the two, so that it records both faults.
        with self._flips(OPERATOR_OUTPUT, OPERATOR_NAN):
            if capture:
                capture.begin(step)
            with self._flips(OPERATOR_INPUT):
                yield
            self._change_state(model, optimizer)
            if capture:
                capture.end()
        self._step = 0

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``; by fault, one is late or has another integer, or two are swapped."""
        for batch in batches:
            fault = self._fault
            if fault.kind == "slowdown" and self._is_here and self._step >= fault.step and not self._step % self._every:
                self._delay()
            if not self._strikes(BATCH_INTEGER, SWAPPED_BATCHES):
                yield batch
                continue
            # The next batch may lie in the same memory.
            with disable_current_modes():
                kept: Any = map_aggregate(batch, lambda values: values.clone())  # type: ignore[union-attr]
                if fault.kind == BATCH_INTEGER:
                    integers = next(values for values in _leaves(kept) if not values.is_floating_point()).view(-1)
                    integers[(fault.call - 1) % len(integers)] ^= 1
            if fault.kind == SWAPPED_BATCHES:
                yield next(batches)
            yield kept

    def around(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return ``forward``, whose backward pass makes zeros in the step of ``drop_gradient``."""

        def planted(*args: Any) -> torch.Tensor:
            output = forward(*args)
            if self._strikes("drop_gradient"):
                output.register_hook(torch.zeros_like)
            return output

        return planted

    def _strikes(self, *kinds: str) -> bool:
        return self._is_here and self._fault.kind in kinds and self._step == self._fault.step

    def _flips(self, *kinds: str) -> AbstractContextManager[object]:
        """Return the context of a step in which a bit flips, if the fault is of ``kinds`` in this step on this rank."""
        fault = self._fault
        if not self._strikes(*kinds):
            return nullcontext()
        return BitFlip(
            fault.operator, fault.call, of_input=fault.kind == OPERATOR_INPUT, is_nan=fault.kind == OPERATOR_NAN
        )

    @torch.no_grad()
    def _change_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Change a weight or a moment of the optimizer if the fault does so after this step."""
        if not self._strikes("weight_ulp", "double_moment", "read_uninitialized"):
            return
        kind, tensors = self._fault.kind, model.parameters()
        if kind == "double_moment":
            tensors = (optimizer.state[parameter]["exp_avg"] for parameter in tensors)
        first = next(shard for shard in map(own_shard, tensors) if shard.numel())
        if kind == "weight_ulp":
            # The next bit pattern is the next float.
            first.view(torch.int32).view(-1)[:1].add_(1)
        elif kind == "double_moment":
            # The largest one, because a change of a small one can be lost in rounding.
            first.view(-1)[first.abs().argmax()] *= 2
        else:
            first.view(-1)[:1].add_(torch.empty(1, dtype=first.dtype, device=first.device))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The highest bit of each mantissa, so that no later rounding removes the difference; for a complex number, that of the
# real part. The lowest bit of an integer, so that an index stays within an even number of rows.
_BITS = {torch.bfloat16: 6, torch.float16: 9, torch.float32: 22, torch.float64: 51, torch.complex64: 22}
_BITS |= {torch.int32: 0, torch.int64: 0}


class BitFlip(TorchDispatchMode):
    """Flips one bit at one call of an operator, in the element of largest magnitude, or makes that element NaN."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile runs its graphs under this mode."""
        return True

    def __init__(self, operator: str, call: int, *, of_input: bool, is_nan: bool = False) -> None:
        """Choose the call, counted from 1, and whether the bit flips before or after it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._call, self._of_input, self._is_nan = operator, call, of_input, is_nan
        self._num_calls = 0

    def __exit__(self, *error: Any) -> None:
        """Leave the mode.

        Raises:
            RuntimeError: The step ended before the call.
        """
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and self._num_calls < self._call:
            raise RuntimeError(f"fault: {self._operator} has {self._num_calls} calls in this step, not {self._call}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and flip the bit at the chosen call."""
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = _leaves((args, kwargs))
        if str(func) != self._operator or any(isinstance(value, FakeTensor) for value in given):
            return func(*args, **kwargs)
        self._num_calls += 1
        is_chosen = self._num_calls == self._call
        named = list(zip(func._schema.arguments, args, strict=False))
        if is_chosen and self._of_input:
            # The arguments of collectives begin with the tensors that they overwrite, which are skipped.
            flip(_leaves([value for argument, value in named if not argument.name.startswith("out")]), is_nan=False)
        result = func(*args, **kwargs)
        if is_chosen and not self._of_input:
            in_place = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
            flip(_leaves((in_place, result)), is_nan=self._is_nan)
        return result


def _leaves(nested: Any) -> list[Any]:
    """Return the values inside of nested tuples, lists and mappings, in order."""
    found: list[Any] = []
    map_aggregate(nested, found.append)
    return found


def flip(values: Iterable[Any], *, is_nan: bool) -> None:
    """Flip a bit in the first tensor of floating-point numbers, else of integers, or make the element NaN."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dtype in _BITS and value.numel()]
    if not tensors:
        raise RuntimeError("fault: the operator has no tensor to flip a bit in")
    with disable_current_modes(), torch.no_grad():
        value = min(tensors, key=lambda tensor: _BITS[tensor.dtype] == 0)
        bits = value.detach().view(_INTEGERS[value.element_size()])
        place = torch.unravel_index(value.detach().abs().argmax(), value.shape)
        if is_nan:
            value.detach()[place] = math.nan
        else:
            bits[place] ^= 1 << _BITS[value.dtype]
