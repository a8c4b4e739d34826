"""Replacement of functions of torch that have no hook."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def replace(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function by one that is called with it and its arguments; return what undoes this."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # What is traced for a graph has no value.
        return original(*args, **kwargs) if torch.compiler.is_compiling() else around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    return functools.partial(setattr, owner, name, original)
