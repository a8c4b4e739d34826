"""Reading of a test's markers into a frozen :class:`TestSpec`: at collection, in its fixtures, and at each launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import did_you_mean
from pytest_aorta.plan.world import ALL_DEVICES, ANY_DEVICE, DEVICES, MAX_NODES, MAX_WORLD_SIZE, WorldSpec
from pytest_aorta.plugin.markers import FIXTURE, MARKERS
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.verdict.metrics import Tolerance, parse_tolerances

MAX_TIMEOUT_S = 7 * 86400
# The names of pytest-timeout: that of its entry point, and that of its module, which -p can load.
_PYTEST_TIMEOUT = ("timeout", "pytest_timeout")
_WORLD_KEYWORDS = ("device", "nodes", "size", "warm")
# Field of TestSpec -> the marker that sets it.
_MARKER_OF = {"world": "world", "tolerances": "tolerance", "timeout_s": "launch_timeout", "measures_overlap": "overlap"}


def read_spec(item: pytest.Item) -> TestSpec:
    """Check and merge the markers that a test has now.

    Raises:
        SpecError: An argument of a marker is unknown or not allowed, or the test launches ranks and has the marker of
            pytest-timeout without that plugin.
    """
    plugins = item.config.pluginmanager
    has_pytest_timeout = any(plugins.has_plugin(name) or plugins.is_blocked(name) for name in _PYTEST_TIMEOUT)
    refuse_timeout = FIXTURE in getattr(item, "fixturenames", ()) and not has_pytest_timeout
    return read_markers(marks_closest_first(item), refuse_timeout=refuse_timeout)


def check_unchanged(item: pytest.Item, spec: TestSpec) -> None:
    """Check that a test still has the markers that its world was made from.

    Raises:
        SpecError: A marker was added or removed since, or is wrong.
    """
    now = vars(read_spec(item))
    if changed := [_MARKER_OF[name] for name, value in vars(spec).items() if now[name] != value]:
        raise SpecError(
            f"marker {changed[0]}: added or removed after the fixture {FIXTURE} was set up, so the change can't apply; "
            f"add it in pytest_collection_modifyitems, or in a fixture that is set up before {FIXTURE}"
        )


def marks_closest_first(item: pytest.Item) -> Iterator[pytest.Mark]:
    """Yield the marks of a test and of its parents, the closest to the test first.

    Those of ``pytest.param`` come before the function's decorators, and those of a class before those of its base
    classes. :meth:`pytest.Item.iter_markers` yields both the other way round.
    """
    for node in reversed(item.listchain()):
        # A mark that two of the places share counts where it is closest.
        places = {id(mark): place for place, mark in reversed(list(enumerate(_declared(node))))}
        declared = [mark for mark in node.own_markers if id(mark) in places]
        ordered = iter(sorted(declared, key=lambda mark: places[id(mark)]))
        # A mark that add_marker added stays before or behind the declared marks.
        yield from (next(ordered) if id(mark) in places else mark for mark in node.own_markers)


def _declared(node: object) -> list[pytest.Mark]:
    """Return the marks that the source declares for a test or a class, the closest first; none for other nodes."""
    target = getattr(node, "obj", None)
    if isinstance(target, type):
        given = [vars(parent).get("pytestmark", []) for parent in target.__mro__]
    else:
        callspec = getattr(node, "callspec", None)
        given = [callspec.marks if callspec else [], getattr(target, "pytestmark", [])]
    listed = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in given)
    return [getattr(mark, "mark", mark) for mark in listed]


def read_markers(marks: Iterable[pytest.Mark], *, refuse_timeout: bool = False) -> TestSpec:
    """Check and merge the marks of a test, closest first.

    Args:
        marks: Marks of the test; those of other plugins are ignored.
        refuse_timeout: Raise an error for the marker ``timeout``, which belongs to pytest-timeout.

    Raises:
        SpecError: An argument of a marker is unknown or not allowed.
    """
    world: WorldSpec | None = None
    timeout_s: float | None = None
    measures_overlap = False
    tolerances: dict[str, Tolerance] = {}
    for mark in marks:
        if mark.name == "world":
            closest = _world(mark)
            world = world or closest
        elif mark.name == "tolerance":
            tolerances = _tolerances(mark) | tolerances
        elif mark.name == "launch_timeout":
            closest_s = _launch_timeout(mark)
            timeout_s = timeout_s or closest_s
        elif mark.name == "timeout" and refuse_timeout:
            raise SpecError(
                "marker timeout: belongs to pytest-timeout, which is not installed; the time limit of each launch is "
                "the marker launch_timeout(SECONDS)"
            )
        elif mark.name in MARKERS and (mark.args or mark.kwargs):
            raise SpecError(f"marker {mark.name} takes no arguments, got {_arguments(mark)}")
        measures_overlap |= mark.name == "overlap"
    return TestSpec(world or WorldSpec(), tolerances, timeout_s, measures_overlap)


def _world(mark: pytest.Mark) -> WorldSpec:
    if len(mark.args) > 1 or (mark.args and "size" in mark.kwargs):
        raise SpecError(f"marker world takes size and device, got {_arguments(mark)}")
    given = ({"size": mark.args[0]} if mark.args else {}) | dict(mark.kwargs)
    if unknown := sorted(set(given) - set(_WORLD_KEYWORDS)):
        hint = did_you_mean(unknown, _WORLD_KEYWORDS)
        raise SpecError(f"marker world has no keywords {unknown}{hint}; there are {list(_WORLD_KEYWORDS)}")
    size, device, warm = given.get("size", 2), given.get("device", ANY_DEVICE), given.get("warm")
    nodes = given.get("nodes", 1)
    is_count = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MAX_WORLD_SIZE
    if not is_count and size != ALL_DEVICES:
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
        raise SpecError(f"marker world: size={size} ranks can't be distributed evenly over nodes={nodes}")
    if warm and nodes > 1:
        raise SpecError(
            f"marker world: warm=True and nodes={nodes} contradict each other: a fork server starts ranks of one host"
        )


def _tolerances(mark: pytest.Mark) -> dict[str, Tolerance]:
    if mark.args or not mark.kwargs:
        raise SpecError(
            f"marker tolerance takes metrics by keyword, e.g. tolerance(step_time_p50='2%'), got {_arguments(mark)}"
        )
    return parse_tolerances(mark.kwargs, "marker tolerance")


def _launch_timeout(mark: pytest.Mark) -> float:
    given: Any = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 < given <= MAX_TIMEOUT_S:
        raise SpecError(
            f"marker launch_timeout takes a number of seconds above 0 and up to {MAX_TIMEOUT_S}, got {_arguments(mark)}"
        )
    return float(given)


def _arguments(mark: pytest.Mark) -> str:
    parts = [repr(value) for value in mark.args] + [f"{key}={value!r}" for key, value in mark.kwargs.items()]
    return f"({', '.join(parts)})"
