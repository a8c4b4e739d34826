"""Places of a profiled step's events in the user's program: modules, and lines of code. Pure.

A rank notes which line and which module run at each moment. An operator of backward has the place of the forward
operator that autograd differentiates, which has the same sequence number.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_aorta.result.trace.kineto import Event, begin_of, holds, is_annotation

_BACKWARD = "autograd::engine::evaluate_function: "
# FSDP2 names the module whose parameters it gathers or whose gradients it reduces.
_OF_FSDP = re.compile(r"^FSDP::\w+ \((\S+)\)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MAX_TEXT = 200


class Moment(NamedTuple):
    """A line and a module that run from this moment on, by ``time.time_ns``; each is empty if unknown."""

    began_ns: int
    module: str
    source: str


class Place(NamedTuple):
    """The place of an event; ``relation`` is empty for an event of forward, else ends with a space."""

    relation: str
    module: str
    source: str

    def __str__(self) -> str:
        """Return text such as ``backward of layers.0 at train.py:12``; empty if nothing is known."""
        module = f"module {self.module}" if self.module[:1] in "0123456789*" and self.module else self.module
        where = " at ".join(filter(None, (module, self.source)))
        return (self.relation + where if where else self.relation.partition(" ")[0])[:_MAX_TEXT]


class Places:
    """The places of a trace's events, which are by thread, given the moments that one thread has noted, in order."""

    def __init__(self, events: Iterable[Event], thread: object, moments: Sequence[Moment], base_ns: int) -> None:
        self._moments = moments
        self._began = [moment.began_ns - base_ns for moment in moments]
        # Id of an event -> the number of autograd's node and the module of FSDP2 that ran around it.
        self._around: dict[int, tuple[int | None, str]] = {}
        # Of operators with one number, the last one to begin has made the node.
        self._forward: dict[int, Event] = {}
        running: list[tuple[Event, int | None, str]] = []
        for event in events:
            while running and not (running[-1][0]["tid"] == event["tid"] and holds(running[-1][0], event)):
                running.pop()
            node, module = self._around[id(event)] = running[-1][1:] if running else (None, "")
            number = event["args"].get("Sequence number")
            if event["name"].startswith(_BACKWARD):
                running.append((event, -1 if number is None else number, module))
            elif is_annotation(event) and (found := _OF_FSDP.match(event["name"])):
                running.append((event, node, found[1]))
            elif number is not None and event["tid"] == thread and not event["args"].get("Fwd thread id"):
                self._forward[number] = event

    def of(self, event: Event) -> Place:
        """Return the place of an event of the host."""
        (node, module), now = self._around[id(event)], self._now(event)
        if node is None or (not module and now.module):
            # A module that runs within backward computes what activation checkpointing has dropped.
            return Place("" if node is None else "recomputation in ", module or now.module, now.source)
        if not module and node in self._forward:
            _, module, source = self._now(self._forward[node])
            return Place("backward of ", module, source)
        return Place("backward of " if module else "", module or "backward", now.source)

    def _now(self, event: Event) -> Moment:
        """Return what the noted thread ran when an event began."""
        number = bisect_right(self._began, begin_of(event))
        return self._moments[number - 1] if number else Moment(0, "", "")


def alike_layers(module: str) -> str:
    """Return the name of a module with ``*`` for each number in it, which layers have in common."""
    return _NUMBER.sub("*", module)


def merged(places: Counter[Place]) -> dict[str, int]:
    """Return places as text with their numbers of calls, the outstanding ones first.

    Places that differ in the numbers of their modules alone, as layers do, and have as many calls, become one with a
    ``*``.
    """
    alike: dict[tuple[Place, int], list[Place]] = defaultdict(list)
    for place, calls in places.items():
        alike[place._replace(module=alike_layers(place.module)), calls].append(place)
    found: Counter[str] = Counter()
    for (pattern, calls), members in sorted(alike.items(), key=lambda item: len(item[1])):
        if text := str(pattern if len(members) > 1 else members[0]):
            found[text] += calls * len(members)
    return dict(found)
