"""Flips of one bit in an operator's output or input, as faulty hardware or a wrong kernel would cause them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The highest bit of each mantissa, so that no later rounding removes the difference; for a complex number, that of the
# real part.
_BITS = {torch.bfloat16: 6, torch.float16: 9, torch.float32: 22, torch.float64: 51, torch.complex64: 22}


class BitFlip(TorchDispatchMode):
    """Flips one bit at one call of an operator, in the element of largest magnitude."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile runs its graphs under this mode."""
        return True

    def __init__(self, operator: str, call: int, *, of_input: bool) -> None:
        """Choose the call, counted from 1, and whether the bit flips before or after it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._call, self._of_input = operator, call, of_input
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
        given = tree_leaves((args, kwargs))
        if str(func) != self._operator or any(isinstance(value, FakeTensor) for value in given):
            return func(*args, **kwargs)
        self._num_calls += 1
        is_chosen = self._num_calls == self._call
        if is_chosen and self._of_input:
            named = zip(func._schema.arguments, args, strict=False)
            # The arguments of collectives begin with the tensors that they overwrite, which are skipped.
            _flip(tree_leaves([value for argument, value in named if not argument.name.startswith("out")]))
        result = func(*args, **kwargs)
        if is_chosen and not self._of_input:
            in_place = [
                value for value, argument in zip(args, func._schema.arguments, strict=False) if _is_written(argument)
            ]
            _flip(tree_leaves((in_place, result)))
        return result


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _flip(values: Iterable[Any]) -> None:
    """Flip a bit in the first tensor of floating-point numbers."""
    with _disable_current_modes(), torch.no_grad():
        for value in values:
            if isinstance(value, torch.Tensor) and value.dtype in _BITS and value.numel():
                bits = value.detach().view(_INTEGERS[value.element_size()])
                place = torch.unravel_index(value.detach().abs().argmax(), value.shape)
                bits[place] ^= 1 << _BITS[value.dtype]
                return
    raise RuntimeError("fault: the operator has no floating-point tensor to flip a bit in")
