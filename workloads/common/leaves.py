"""The values inside of nested tuples, lists and mappings, such as the arguments of an operator."""

from __future__ import annotations

from typing import Any

from torch.fx.node import map_aggregate


def leaves(nested: Any) -> list[Any]:
    """Return the values in order."""
    found: list[Any] = []
    map_aggregate(nested, found.append)
    return found
