"""Finds the runtime call in which the host waits for the device. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_aorta.result.trace.kineto.events import begin_of, events_and_boundaries, holds, is_runtime_call

# Runtime calls that return only after the device has done earlier work: CUDA's, HIP's of the same names, and the copy
# that torch's .item() makes on HIP.
_BLOCKING = re.compile(r"^(cuda|hip|cu)(\w*Synchronize|Free|Memcpy|MemcpyDtoH)(_v\d+)?$|^hipMemcpyWithStream$")


def find_blocking_call(trace: Mapping[str, Any]) -> str | None:
    """Return the runtime call in which the host waits for the device within a step, with its operator, or None.

    The longest such call is named. Calls of threads that launch nothing, such as NCCL's watchdog, don't count.
    """
    events, marks = events_and_boundaries(trace)
    calls = [event for event in events if is_runtime_call(event)]
    threads = {event["tid"] for event in calls if "aunchKernel" in event["name"]}
    begin, end = begin_of(marks[0]), begin_of(marks[-1])
    waits = [
        event
        for event in calls
        if event["tid"] in threads and _BLOCKING.search(event["name"]) and begin <= begin_of(event) < end
    ]
    if not waits:
        return None
    longest = max(waits, key=lambda event: event["dur"])
    around = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] == longest["tid"] and holds(event, longest)
    ]
    names = [event["name"] for event in sorted(around, key=begin_of)]
    return " in ".join([longest["name"], *names[:1]])
