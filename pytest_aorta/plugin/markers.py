"""The markers: each is one row, from which pytest's help, the docs and the typed values of a test are made."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.world import ALL_DEVICES, DEVICES, MAX_NODES, MAX_SIMULATED_RANKS, MAX_WORLD_SIZE, WorldSpec

if TYPE_CHECKING:
    from pytest_aorta.session.session import TestSpec

# Tests that use this fixture, directly or through ``workload``, launch ranks.
FIXTURE = "distributed_world"
MAX_TIMEOUT_S = 7 * 86400


def can_launch(item: pytest.Item) -> bool:
    """Return whether a test has a fixture of this plugin."""
    return FIXTURE in getattr(item, "fixturenames", ())


@dataclass(frozen=True)
class _Marker:
    """A marker of tests that launch.

    Attributes:
        usage: Name and arguments.
        help: Meaning.
        read: Takes the marker's arguments and returns their value; raises SpecError for one that is not allowed.
        field: Field of :class:`~pytest_aorta.session.session.TestSpec` that the marker sets; None: it only selects
            tests.
        merge: Makes the field's value of those of all the test's markers of this name, the closest first.
    """

    usage: str
    help: str
    read: Callable[..., Any]
    field: str | None = None
    merge: Callable[[Sequence[Any]], Any] = bool

    def value(self, mark: pytest.Mark) -> Any:
        """Return the value of one mark.

        Raises:
            SpecError: An argument is unknown or not allowed.
        """
        try:
            inspect.signature(self.read).bind(*mark.args, **mark.kwargs)
        except TypeError as error:
            raise SpecError(f"marker {self.usage}: {error}, in {_arguments(mark)}") from None
        return self.read(*mark.args, **mark.kwargs)


def _arguments(mark: pytest.Mark) -> str:
    parts = [repr(value) for value in mark.args] + [f"{key}={value!r}" for key, value in mark.kwargs.items()]
    return f"({', '.join(parts)})"


def _nothing() -> bool:
    return True


def _is_count(given: object, most: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= most


def _world(
    size: Any = 2, device: Any = WorldSpec.device, nodes: Any = 1, warm: Any = None, simulated: Any = None
) -> WorldSpec:
    if not _is_count(size, MAX_WORLD_SIZE) and size != ALL_DEVICES:
        raise SpecError(f"marker world: size={size!r}, allowed is an integer from 1 to {MAX_WORLD_SIZE} or 'all'")
    if device not in DEVICES:
        raise SpecError(f"marker world: device={device!r}, allowed is one of {', '.join(DEVICES)}")
    if not _is_count(nodes, MAX_NODES):
        raise SpecError(f"marker world: nodes={nodes!r}, allowed is an integer from 1 to {MAX_NODES}")
    if warm is not None and not isinstance(warm, bool):
        raise SpecError(f"marker world: warm={warm!r}, allowed is True or False")
    if size != ALL_DEVICES and size % nodes:
        raise SpecError(f"marker world: size={size} ranks can't be distributed evenly over nodes={nodes}")
    if warm and nodes > 1:
        raise SpecError(f"marker world: warm=True and nodes={nodes} contradict each other: a fork server has one host")
    return WorldSpec(size, device, warm, nodes, _simulated(simulated, size, nodes))


def _simulated(given: Any, size: int | str, nodes: int) -> tuple[int, ...] | None:
    """Return the ranks to simulate: rank 0 for True, none for False; None leaves the choice to the options."""
    if given is None or given is False:
        return None if given is None else ()
    if size == ALL_DEVICES or nodes > 1:
        raise SpecError(
            f"marker world: size={size!r}, nodes={nodes} and simulated={given!r} contradict each other; a simulated "
            f"world is one host with a number of ranks"
        )
    ranks = (0,) if given is True else tuple(given) if isinstance(given, list | tuple) else ()
    is_fit = all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < int(size) for rank in ranks)
    if not is_fit or not 1 <= len(ranks) <= MAX_SIMULATED_RANKS or len(set(ranks)) < len(ranks):
        raise SpecError(
            f"marker world: simulated={given!r}, allowed is True, False, or up to {MAX_SIMULATED_RANKS} different "
            f"ranks from 0 to {int(size) - 1}, such as simulated=(0, {int(size) - 1})"
        )
    return ranks


def _tolerances(**metrics: Any) -> dict[str, Any]:
    from pytest_aorta.verdict.metrics import parse_tolerances  # only a test with a launch needs the table of metrics

    if not metrics:
        raise SpecError("marker tolerance: names no metric; write e.g. tolerance(step_time_p50='2%')")
    return parse_tolerances(metrics, "marker tolerance")


def _launch_timeout(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise SpecError(f"marker launch_timeout: {seconds!r}, allowed are seconds above 0 and up to {MAX_TIMEOUT_S}")
    return float(seconds)


MARKERS = {
    "overlap": _Marker(
        "overlap", "the test measures how communication overlaps with compute", _nothing, "measures_overlap"
    ),
    "numerics": _Marker(
        "numerics", "the test compares weights, losses or gradients bit for bit", _nothing, "compares_numbers"
    ),
    "world": _Marker(
        "world(size=2, device='any', nodes=1, warm=None, simulated=None)",
        "ranks to launch, one per device; size is an integer, or 'all' for all devices of this run; device is "
        f"{' or '.join(DEVICES)}; nodes=2 distributes the ranks evenly over several nodes; warm=True starts ranks "
        "from the fork server, False by torchrun; simulated=True runs rank 0 alone, without devices, and "
        "simulated=(0, 512) these ranks: nothing is exchanged, and only costs are compared; simulated=False never "
        "does, whatever --aorta-without-gpus says",
        _world,
        "world",
        lambda values: values[0] if values else WorldSpec(),
    ),
    "tolerance": _Marker(
        "tolerance(METRIC='5%')",
        "the change against the baseline that is allowed, by metric; 'exact' allows no change",
        _tolerances,
        "tolerances",
        lambda values: dict(ChainMap(*values)),
    ),
    "launch_timeout": _Marker(
        "launch_timeout(SECONDS)",
        "time limit of each launch of the test",
        _launch_timeout,
        "timeout_s",
        lambda values: values[0] if values else None,
    ),
}


def read_spec(item: pytest.Item) -> TestSpec:
    """Return the values of the markers that a test has now. The closest marker wins, as in ``get_closest_marker``.

    Raises:
        SpecError: An argument of a marker is unknown or not allowed.
    """
    from pytest_aorta.session.session import TestSpec  # only a test with a launch needs the table of metrics

    read = {name: [row.value(mark) for mark in item.iter_markers(name)] for name, row in MARKERS.items()}
    return TestSpec(**{row.field: row.merge(read[name]) for name, row in MARKERS.items() if row.field is not None})


def check_unchanged(item: pytest.Item, spec: TestSpec) -> None:
    """Check that a test still has the markers that its world was made from.

    Raises:
        SpecError: A marker was added or removed since, or is wrong.
    """
    now = read_spec(item)
    for name, row in MARKERS.items():
        if row.field is not None and getattr(now, row.field) != getattr(spec, row.field):
            raise SpecError(
                f"marker {name}: added or removed after the fixture {FIXTURE} was set up, so the change can't apply; "
                f"add it in pytest_collection_modifyitems, or in a fixture that is set up before {FIXTURE}"
            )
