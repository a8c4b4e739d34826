"""Places of a profiled step's events in the user's program: modules, and lines of code. Pure.

A rank notes which line and which module run at each moment. An operator of backward has the place of the forward
operator that autograd differentiates, which has the same sequence number.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_aorta.result.trace.kineto_events import BOUNDARY, Event, begin_of, end_of, is_annotation, with_duration

_BACKWARD = "autograd::engine::evaluate_function: "
# FSDP2 names the module whose parameters it gathers or whose gradients it reduces.
_OF_FSDP = re.compile(r"^FSDP::\w+ \((\S+)\)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Spans of one thread that may begin between an event and the span around the event.
_MOST_NESTED = 16
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
        return (self.relation + " at ".join(filter(None, (module, self.source))))[:_MAX_TEXT]


class _Spans:
    """Spans of one thread, in the order of their begin."""

    def __init__(self, events: Iterable[tuple[Event, Any]]) -> None:
        self._spans = sorted(
            ((begin_of(event), end_of(event), value) for event, value in events), key=lambda one: one[0]
        )
        self._begins = [begin for begin, *_ in self._spans]

    def around(self, event: Event) -> Any:
        """Return the value of the innermost span around an event, or None."""
        last = bisect_right(self._begins, begin_of(event))
        near = reversed(self._spans[max(0, last - _MOST_NESTED) : last])
        return next((value for _, end, value in near if end >= end_of(event)), None)


class Places:
    """The places of a trace's events, given the moments that the thread of the boundaries has noted, in order."""

    def __init__(self, trace: Mapping[str, Any], moments: Sequence[Moment]) -> None:
        base, events = trace.get("baseTimeNanoseconds", 0), with_duration(trace)
        self._moments = moments
        self._began = [moment.began_ns - base for moment in moments]
        self._thread = next((event["tid"] for event in events if event["name"] == BOUNDARY), None)
        nodes, modules = defaultdict(list), defaultdict(list)
        # Of operators with one number, the last one to begin has made the node.
        self._forward: dict[int, Event] = {}
        for event in sorted(events, key=begin_of):
            number = event["args"].get("Sequence number", -1)
            if event["name"].startswith(_BACKWARD):
                nodes[event["tid"]].append((event, number))
            elif is_annotation(event):
                if found := _OF_FSDP.match(event["name"]):
                    modules[event["tid"]].append((event, found[1]))
            elif number >= 0 and event["tid"] == self._thread and not event["args"].get("Fwd thread id"):
                self._forward[number] = event
        self._nodes = {thread: _Spans(spans) for thread, spans in nodes.items()}
        self._modules = {thread: _Spans(spans) for thread, spans in modules.items()}

    def of(self, event: Event) -> Place:
        """Return the place of an event of the host."""
        thread, now = event["tid"], self._now(event)
        module = self._modules[thread].around(event) if thread in self._modules else None
        number = self._nodes[thread].around(event) if thread in self._nodes else None
        if number is None or (module is None and now.module):
            # A module that runs within backward computes what activation checkpointing has dropped.
            return Place("recomputation in " if number is not None else "", module or now.module, now.source)
        if module is not None:
            return Place("backward of ", module, now.source)
        if number in self._forward:
            forward = self._now(self._forward[number])
            if forward.module or forward.source:
                return Place("backward of ", forward.module, forward.source)
        return Place("", "backward", now.source)

    def _now(self, event: Event) -> Moment:
        """Return what the thread of the boundaries ran when an event began."""
        number = bisect_right(self._began, begin_of(event))
        return self._moments[number - 1] if number else Moment(0, "", "")


def merged(places: Counter[Place]) -> dict[str, int]:
    """Return places as text with their numbers of calls, the outstanding ones first.

    Places that differ in the numbers of their modules alone, as layers do, and have as many calls, become one with a
    ``*``.
    """
    alike: dict[tuple[Place, int], list[Place]] = defaultdict(list)
    for place, calls in places.items():
        alike[place._replace(module=_NUMBER.sub("*", place.module)), calls].append(place)
    found: Counter[str] = Counter()
    for (pattern, calls), members in sorted(alike.items(), key=lambda item: len(item[1])):
        if text := str(pattern if len(members) > 1 else members[0]):
            found[text] += calls * len(members)
    return dict(found)
