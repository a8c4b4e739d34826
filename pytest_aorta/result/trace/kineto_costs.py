"""Counts the costs of one step in a Kineto trace that has host events with shapes."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_aorta.common.files import without_collection
from pytest_aorta.result.trace.families import family_of, is_copy
from pytest_aorta.result.trace.kineto import (
    DTYPES,
    Args,
    Event,
    Trace,
    begin_of,
    by_correlation,
    by_thread,
    collective_of,
    element_bytes,
    end_of,
    events_and_boundaries,
    holds,
    is_annotation,
    is_on_device,
    is_runtime_call,
    is_within,
    operators_of,
    span_of,
    tensors_of,
    waits_of_host,
    works_of_gloo,
)
from pytest_aorta.result.trace.kineto_graph import Request, graph_of_step
from pytest_aorta.result.trace.kineto_places import Moment, Places, merged
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveCost, Cost, Costs, joined_collectives

# The operator through which each collective of a process group passes, whichever backend serves it.
_COLLECTIVES = "c10d::"
# A functional collective, which requests one of a process group.
_FUNCTIONAL = "_c10d_functional::"
# Collectives with a list of tensors for each tensor; an event has the shapes of no such lists.
_OF_LISTS = ("c10d::allgather_", "c10d::reduce_scatter_")
# A step of the iterator of a DataLoader that has worker processes.
_FROM_WORKERS = "enumerate(DataLoader)#_MultiProcessing"
# Namespaces of operators that do not compute, so that they need no formula of operations.
_WITHOUT_COMPUTE = (
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "fsdp",
    "autograd",
    "torch",
    "profiler",
    "inductor",
    "_dtensor",
    "symm_mem",
)
_MAX_NAME = 200
_TO_HOST = re.compile("DtoH|DeviceToHost")


@dataclass(frozen=True)
class RecordedCall:
    """A call of a collective as a flight recorder knows it.

    Attributes:
        group: Name of the process group.
        group_size: Number of ranks in the group; None if unknown.
        dtype: Type of the elements, by torch's name in the recorder; empty if unknown.
        num_bytes: Bytes of the call, which its operator shows; None if its type or its tensors are not known.
    """

    group: str = ""
    group_size: int | None = None
    dtype: str = ""
    num_bytes: int | None = None


# Operations of an operator, given its name and the arguments of its event; None if there is no formula for it.
FlopsOf: TypeAlias = Callable[[str, Args], "int | None"]
# A part of a cost, and the host's event that caused it.
_Call: TypeAlias = "tuple[str, Event]"


@without_collection()
def costs_of_step(
    trace: Trace,
    flops_of: FlopsOf,
    is_view: Callable[[str], bool],
    *,
    on_device: bool,
    recorded: Sequence[RecordedCall] = (),
    moments: Sequence[Moment] = (),
) -> Costs:
    """Return the costs of the first step of a trace, which lies between two boundaries.

    ``recorded`` are the calls of collectives that a flight recorder has of this step. They complete the trace if they
    are as many as the trace has. With ``moments``, the lines and modules that ran, the costs have their places.

    Raises:
        ValueError: The trace has fewer than two boundaries.
    """
    events, marks = events_and_boundaries(trace)
    # Sorted once, since a step has tens of thousands of events.
    events = by_thread(events)
    edges = end_of(marks[0]), begin_of(marks[1])
    inside = [event for event in events if is_within(event, edges) and not is_on_device(event)]
    operators = _operators(inside)
    known = ((event, flops_of(event["name"], event["args"])) for event in operators)
    numbers = {id(event): number for event, number in known if number is not None}
    flops, without = _flops(operators, numbers)
    collectives = _collectives(inside, operators, recorded)
    places = Places(events, marks[0]["tid"], moments, trace["baseTimeNanoseconds"])
    calls: dict[Cost, list[_Call]] = {Cost.OPERATORS: [(event["name"][:_MAX_NAME], event) for event in operators]}
    calls[Cost.HOST_COPIES] = [call for call in calls[Cost.OPERATORS] if call[0] == "aten::_local_scalar_dense"]
    calls |= _calls_of_device(events, inside) if on_device else {}
    counts: dict[str, Any] = {cost: _sorted(Counter(name for name, _ in found)) for cost, found in calls.items()}
    calls[Cost.COLLECTIVES] = [(str(one.cost), one.event) for one in collectives]
    return Costs(
        collectives=joined_collectives(one.cost for one in collectives),
        flops=_sorted(flops),
        without_flops=_sorted(without),
        places=_places(places, calls) if moments else {},
        graph=graph_of_step(inside, operators, collectives, numbers, is_view, places),
        **counts,
    )


def _calls_of_device(events: Iterable[Event], inside: Sequence[Event]) -> dict[Cost, list[_Call]]:
    """Return the host's calls in the step that caused kernels, copies to the host, and waits."""
    runtime = [event for event in inside if is_runtime_call(event)]
    launching = by_correlation(runtime)
    kernels = [
        (family_of(event["name"]), launching[number])
        for event in filter(is_on_device, events)
        if (number := event["args"].get("correlation")) in launching
    ]
    return {
        Cost.KERNELS: kernels,
        Cost.HOST_COPIES: [call for call in kernels if is_copy(call[0]) and _TO_HOST.search(call[0])],
        Cost.HOST_SYNCS: [(wait["name"], wait) for wait in waits_of_host(runtime)],
    }


def _places(places: Places, calls: Mapping[Cost, Iterable[_Call]]) -> dict[Cost, dict[str, dict[str, int]]]:
    found: dict[Cost, dict[str, dict[str, int]]] = {}
    for cost, each in calls.items():
        by_name: dict[str, list[Event]] = defaultdict(list)
        for name, event in each:
            by_name[name].append(event)
        if by_name:
            found[cost] = {name: merged(Counter(map(places.of, events))) for name, events in by_name.items()}
    return found


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _operators(events: Sequence[Event]) -> list[Event]:
    """Return the operators of events by thread, without those on threads of gloo."""
    operators = operators_of(events)
    requesting = {event["tid"] for event in operators if event["name"].startswith(_COLLECTIVES)}
    # What a thread of gloo copies depends on how far it got; the request is counted on the thread that made it.
    left_out = {event["tid"] for event in works_of_gloo(events)} - requesting
    # The batches that a step takes from workers depend on how far these got.
    loading = [event for event in events if event["name"].startswith(_FROM_WORKERS) and is_annotation(event)]
    # Nodes of autograd compute by operators of their own.
    nodes = ("autograd::engine", "torch::autograd::")
    return [
        event
        for event in operators
        if event["tid"] not in left_out
        and not event["name"].startswith(nodes)
        and not (loading and any(one["tid"] == event["tid"] and holds(one, event) for one in loading))
    ]


def _flops(operators: Sequence[Event], numbers: Mapping[int, int]) -> tuple[Counter[str], Counter[str]]:
    """Return operations by operator, and the calls of operators without a formula.

    An operator within another one that has a formula is a part of it.
    """
    found: Counter[str] = Counter()
    without: Counter[str] = Counter()
    # The thread and the end of the last operator that was counted.
    within: tuple[object, int] = "", 0
    for event in operators:
        if event["tid"] == within[0] and end_of(event) <= within[1]:
            continue
        name = event["name"][:_MAX_NAME]
        number = numbers.get(id(event))
        if number is not None:
            found[name] += number
            within = event["tid"], end_of(event)
        elif name.split("::")[0] not in _WITHOUT_COMPUTE:
            without[name] += 1
    return found, without


def _collectives(
    events: Sequence[Event], operators: Sequence[Event], recorded: Sequence[RecordedCall]
) -> list[Request]:
    """Return the collectives that the step requests, in order."""
    requests = _requests(operators)
    # A flight recorder of gloo has no entry for a message from one rank to another.
    collective = [one for one in requests if collective_of(one[0]["name"]) is not Collective.SEND_RECV]
    if len(recorded) != len(collective):
        # A simulated rank notes no functional collective of tensors with data.
        collective = [one for one in collective if one[1] is None]
    known = {id(event): call for (event, _), call in zip(collective, recorded, strict=False)}
    known = known if len(recorded) == len(collective) else {}
    records = [event for event in events if event["name"] == "record_param_comms"]
    messages = [one for one in works_of_gloo(events) if one["name"] in ("gloo:send", "gloo:recv")]
    # Names of groups differ between worlds.
    groups: dict[str, str] = {}
    found = []
    for event, function in requests:
        kind, is_functional = collective_of(event["name"]), event["name"].startswith(_FUNCTIONAL)
        served: Args = next((one["args"] for one in records if one["tid"] == event["tid"] and holds(event, one)), {})
        # Of gloo's messages, the operator has a list of tensors, and the annotation that begins within it their type.
        typed = (one["args"] for one in messages if event["tid"] == one["tid"] and is_within(one, span_of(event)))
        sent: Args = function or next(typed, {})
        call = _call_of(event["args"], served, known.get(id(event), RecordedCall(dtype=_tensors(sent)[1])))
        is_gather = is_functional and kind is Collective.ALL_GATHER and not event["name"].endswith("_out")
        num_bytes = call.num_bytes
        if is_gather or event["name"] in _OF_LISTS:
            # The event does not have the tensors of all ranks.
            num_bytes = None if num_bytes is None or call.group_size is None else num_bytes * call.group_size
        group = groups.setdefault(call.group, f"group {len(groups)}")
        called = event["name"].removeprefix(_COLLECTIVES).strip("_") if kind is Collective.OTHER else kind
        cost = CollectiveCost(called, 1, call.group_size, call.dtype, num_bytes)
        found.append(Request(cost, group, event, is_functional or function is not None))
    return found


def _requests(operators: Iterable[Event]) -> list[tuple[Event, Args | None]]:
    """Return the outermost operators of process groups, and functional collectives that reach no process group.

    With an operator come the arguments of the functional collective that has called it; None without one.

    A mode of dispatch passes an operator on to the same operator, which is one request. Of tensors without data, a
    functional collective computes shapes alone.
    """
    named = (event for event in operators if event["name"].startswith((_COLLECTIVES, _FUNCTIONAL)))
    found: list[tuple[Event, Args | None]] = []
    for event in sorted(named, key=lambda event: (begin_of(event), -end_of(event))):
        if event["name"].startswith(_FUNCTIONAL) and collective_of(event["name"]) is Collective.OTHER:
            continue  # such as the wait for a collective's end
        last = found[-1][0] if found else None
        if last is None or last["tid"] != event["tid"] or not holds(last, event):
            found.append((event, None))
        elif last["name"].startswith(_FUNCTIONAL) and event["name"].startswith(_COLLECTIVES):
            found[-1] = event, last["args"]
    return found


def _call_of(args: Args, served: Args, call: RecordedCall) -> RecordedCall:
    """Return a call by the arguments of its operator, NCCL's record of it, and a flight recorder's."""
    elements, dtype = _tensors(args)
    dtype = dtype or call.dtype or str(served.get("dtype", ""))
    each = element_bytes(dtype)
    size = served.get("Group size")
    return RecordedCall(
        call.group or str(served.get("Process Group Name", "")),
        call.group_size or (size if type(size) is int and size > 0 else None),
        DTYPES.get(dtype, dtype)[:40],
        None if each is None or elements is None else elements * each,
    )


def _tensors(args: Args) -> tuple[int | None, str]:
    """Return the elements of the largest tensor argument, or list of tensors, and the type; empty if unknown."""
    given = tensors_of(args)
    elements = [sum(map(math.prod, shapes)) for _, shapes in given]
    return max(elements, default=None), next((kind for kind, _ in given if kind), "")
