"""Operations of an operator by torch's registry of formulas, from the arguments that a trace shows."""

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_aorta.worker.torch_private import OpOverloadPacket

# Operators of convolutions, whose formulas need the shape of the result, and their arguments by position.
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
# Operators that neither read elements nor write any of the tensor that they return.
_WITHOUT_WORK = (
    "aten::_unsafe_view",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::detach_",
    "aten::requires_grad_",
    "aten::record_stream",
)
# Namespaces of operators that wrap tensors or request collectives.
_WITHOUT_TENSORS = ("c10d", "_c10d_functional", "profiler", "prim")


def flops_of(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the operations of one operator of a trace by torch's registry of formulas; None if it has no formula.

    Args:
        name: The operator's name in the trace, such as ``aten::mm``.
        args: The arguments of the trace's event, with shapes and concrete values.
    """
    if (found := _formulas().get(name)) is None:
        return None
    formula, num_positional = found
    given: list[Any] = [
        torch.Size(dims) if kind not in ("", "Scalar", "ScalarList", "TensorList") else _literal(value)
        for kind, dims, value in zip(
            args.get("Input type", ()), args.get("Input Dims", ()), args.get("Concrete Inputs", ()), strict=False
        )
    ][:num_positional]
    try:
        if name in _CONVOLUTIONS:
            left, weight, _, stride, padding, dilation, transposed, *_ = given
            shape = None if transposed else _convolved(left, weight, stride, padding, dilation)
            return int(formula(*given, out_val=shape))
        if name == _CONVOLUTION_BACKWARD:
            return int(formula(*given, out_val=(given[1], given[2], None)))
        return int(formula(*given))
    # Registered formulas refuse arguments that they were not written for with errors of any kind.
    except Exception:  # noqa: BLE001
        return None


@functools.cache
def is_view(name: str) -> bool:
    """Return whether an operator of a trace returns an argument of it without reading or writing it."""
    namespace, _, operator = name.partition("::")
    # Operators of libraries may be gone at the end of the rank, when its trace is read.
    if name in _WITHOUT_WORK or namespace != "aten":
        return name in _WITHOUT_WORK or namespace.startswith(_WITHOUT_TENSORS)
    packet = getattr(torch.ops.aten, operator)
    results = getattr(packet, packet.overloads()[0])._schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in results)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _convolved(
    left: torch.Size, weight: torch.Size, stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Size:
    sizes = zip(left[2:], weight[2:], stride, padding, dilation, strict=True)
    inner = [(size + 2 * pad - step * (width - 1) - 1) // by + 1 for size, width, by, pad, step in sizes]
    return torch.Size([left[0], weight[0], *inner])


@functools.cache
def _formulas() -> dict[str, tuple[Callable[..., Any], int]]:
    """Return the name of each operator that has a formula -> the formula, and the number of positional arguments."""
    from torch.utils.flop_counter import flop_registry

    found = {}
    # The registry also has formulas of higher-order operators and of kernels of Triton.
    for packet in (key for key in flop_registry if isinstance(key, OpOverloadPacket)):
        arguments = getattr(packet, packet.overloads()[0])._schema.arguments
        name = str(packet).replace(".", "::", 1)
        found[name] = flop_registry[packet], sum(not argument.kwarg_only for argument in arguments)
    return found
