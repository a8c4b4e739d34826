"""Checks for NaN and infinite values, which fail a run: they can be neither compared nor written as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from pytest_aorta.worker.hashing.layout import local_part

# torch.isfinite supports these types on every device.
_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# Types of 8 bits that torch.isfinite does not support, and whose numbers bfloat16 represents exactly.
_CHECKED_AS_BFLOAT16 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


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


def refuse_metrics(metrics: Mapping[str, float], rank: int) -> None:
    """Check the metrics of a rank.

    Raises:
        NotFinite: A metric is NaN or infinite.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NotFinite(f"metric {name} of rank {rank} is {value}; record a finite number, or no such metric")


def refuse_parameters(named: Iterable[tuple[str, torch.Tensor]], rank: int, when: str) -> None:
    """Check this rank's part of each parameter; not collective. ``when`` is the time of the check, for the message.

    Raises:
        NotFinite: An element is NaN or infinite.
    """
    parts = [(name, local_part(tensor.detach())) for name, tensor in named if _has_data(tensor)]
    checked = [
        (name, part) for name, part in parts if part.dtype in (*_CHECKED, *_CHECKED_AS_BFLOAT16) and part.numel()
    ]
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


def _is_finite(part: torch.Tensor) -> torch.Tensor:
    return (part.to(torch.bfloat16) if part.dtype in _CHECKED_AS_BFLOAT16 else part).isfinite()


def _has_data(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_lazy(tensor))
