"""The markers of a test, checked at collection and read into a frozen :class:`TestSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.world import DEVICES, MAX_NODES, MAX_WORLD_SIZE, WorldSpec
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.verdict.metrics import Tolerance, parse_tolerances

MARKERS = {
    "overlap": "overlap: the test measures how communication overlaps with compute.",
    "numerics": "numerics: the test compares weights, losses or gradients bit for bit.",
    "world": "world(size=2, device='any'): ranks to launch, one a device; size is an integer or 'all' the devices "
    "of this run; device is 'any', 'cuda' or 'cpu'; nodes=2 spreads them evenly over several nodes; warm=True starts "
    "ranks from the fork server, False by torchrun.",
    "tolerance": "tolerance(METRIC='5%'): the change allowed against the baseline, by metric; 'exact' for none.",
    "timeout": "timeout(SECONDS): time limit of each launch of the test.",
}
MAX_TIMEOUT_S = 7 * 86400


def read_markers(marks: Iterable[pytest.Mark]) -> TestSpec:
    """Check and merge a test's marks, closest first.

    Raises:
        SpecError: an argument is unknown or not allowed.
    """
    world: WorldSpec | None = None
    timeout_s: float | None = None
    tolerances: dict[str, Tolerance] = {}
    for mark in marks:
        if mark.name == "world":
            closest = _world(mark)
            world = world or closest
        elif mark.name == "tolerance":
            tolerances = _tolerances(mark) | tolerances
        elif mark.name == "timeout":
            closest_s = _timeout(mark)
            timeout_s = timeout_s or closest_s
        elif mark.name in MARKERS and (mark.args or mark.kwargs):
            raise SpecError(f"marker {mark.name} takes no arguments, got {_arguments(mark)}")
    return TestSpec(world or WorldSpec(), tolerances, timeout_s)


def _world(mark: pytest.Mark) -> WorldSpec:
    if len(mark.args) > 1 or (mark.args and "size" in mark.kwargs):
        raise SpecError(f"marker world takes size and device, got {_arguments(mark)}")
    given = ({"size": mark.args[0]} if mark.args else {}) | dict(mark.kwargs)
    if unknown := sorted(set(given) - {"size", "device", "warm", "nodes"}):
        raise SpecError(f"marker world has no keywords {unknown}; there are ['device', 'nodes', 'size', 'warm']")
    size, device, warm = given.get("size", 2), given.get("device", "any"), given.get("warm")
    nodes = given.get("nodes", 1)
    is_count = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MAX_WORLD_SIZE
    if not is_count and size != "all":
        raise SpecError(f"marker world: size={size!r}, allowed is an integer from 1 to {MAX_WORLD_SIZE} or 'all'")
    if device not in DEVICES:
        raise SpecError(f"marker world: device={device!r}, allowed is one of {', '.join(DEVICES)}")
    if "warm" in given and not isinstance(warm, bool):
        raise SpecError(f"marker world: warm={warm!r}, allowed is True or False")
    _check_nodes(size, warm, nodes)
    return WorldSpec(size, device, warm, nodes)


def _check_nodes(size: int | str, warm: bool | None, nodes: object) -> None:
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MAX_NODES:
        raise SpecError(f"marker world: nodes={nodes!r}, allowed is an integer from 1 to {MAX_NODES}")
    if isinstance(size, int) and size % nodes:
        raise SpecError(f"marker world: size={size} ranks can't be shared out evenly over nodes={nodes}")
    if warm and nodes > 1:
        raise SpecError(f"marker world: warm=True is for one node, and nodes={nodes}: the fork server is this host's")


def _tolerances(mark: pytest.Mark) -> dict[str, Tolerance]:
    if mark.args or not mark.kwargs:
        raise SpecError(
            f"marker tolerance takes metrics by keyword, e.g. tolerance(step_time_p50='2%'), got {_arguments(mark)}"
        )
    return parse_tolerances(mark.kwargs, "marker tolerance")


def _timeout(mark: pytest.Mark) -> float:
    given: Any = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    # Further keywords belong to pytest-timeout, which shares the marker.
    if len(mark.args) > 1 or not is_number or not 0 < given <= MAX_TIMEOUT_S:
        raise SpecError(
            f"marker timeout takes a number of seconds above 0 and up to {MAX_TIMEOUT_S}, got {_arguments(mark)}"
        )
    return float(given)


def _arguments(mark: pytest.Mark) -> str:
    parts = [repr(value) for value in mark.args] + [f"{key}={value!r}" for key, value in mark.kwargs.items()]
    return f"({', '.join(parts)})"
