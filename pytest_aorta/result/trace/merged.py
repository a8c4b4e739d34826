"""Profiler traces that a launch kept: a note with their location, and one merged trace of all ranks on one clock.

The merged trace is for Perfetto or chrome://tracing.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.common.files import write_bytes
from pytest_aorta.plan.options import NSYS, ROCPROFV3, TORCH
from pytest_aorta.result.folder import RANKS_FOLDER, TRACES
from pytest_aorta.result.trace.kineto import read_trace

Document: TypeAlias = dict[str, Any]

# The key of a kept trace that says whether the host had a head start in its steps.
HEAD_START_KEY = "headStart"
_NO_HEAD_START = (
    "the host had no head start in their steps, so communication can be exposed that the metrics show as hidden"
)
_RANK_TRACES = f"{RANKS_FOLDER}/*/{TRACES}"
# Perfetto treats thread numbers as unique over the whole machine, so each rank gets a range of its own.
_THREADS_PER_RANK = 10_000
_IDS_PER_RANK = 1 << 32
_US_PER_NS = 1e-3


def traces_note(profiler: str, run_dir: Path, *, on_device: bool) -> str:
    """Return a note that says where a launch's traces are and what they show; empty if the profiler left none."""
    pattern = {TORCH: _RANK_TRACES, NSYS: f"{NSYS}.*", ROCPROFV3: f"{ROCPROFV3}/**/*.*"}[profiler]
    found = sorted(run_dir.glob(pattern))
    if not found:
        return ""
    first = found[0].relative_to(run_dir)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    note = f"; {_NO_HEAD_START}" if profiler == TORCH and on_device else ""
    return f"traces of {profiler} in {run_dir}: {first}{more}{note}"


def merge_run(run_dir: Path) -> list[Path]:
    """Merge the ranks' traces of each name into a file of that name in ``run_dir``, and return the files.

    Raises:
        ValueError: A rank's file is not a trace.
    """
    by_name: dict[str, dict[int, Path]] = {}
    for path in run_dir.glob(_RANK_TRACES):
        by_name.setdefault(path.name, {})[int(path.parent.name)] = path
    # Later repeats have longer names, from trace.json.gz to trace-10.json.gz.
    written = [run_dir / name for name in sorted(by_name, key=lambda name: (len(name), name))]
    for path in written:
        paths = by_name[path.name]
        merged = merge_traces({rank: read_trace(paths[rank]) for rank in sorted(paths)})
        write_bytes(path, gzip.compress(json.dumps(merged).encode(), compresslevel=4))
    return written


def merge_traces(traces: Mapping[int, Mapping[str, Any]]) -> Document:
    """Return one trace with a process per rank, in order of rank, that contains its threads and its device's streams.

    Times count from the earliest ``baseTimeNanoseconds`` of all ranks. Flows and asynchronous events stay within their
    rank.
    """
    base_ns = min(int(trace.get("baseTimeNanoseconds", 0)) for trace in traces.values())
    events: list[Document] = []
    for rank, trace in sorted(traces.items()):
        later_us = (int(trace.get("baseTimeNanoseconds", 0)) - base_ns) * _US_PER_NS
        events += _rank_events(rank, trace["traceEvents"], later_us)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "ranks": {str(rank): _about(trace) for rank, trace in sorted(traces.items())},
        "traceEvents": events,
    }


def _about(trace: Mapping[str, Any]) -> Document:
    """Return a rank's position in the world and whether its host had a head start, if its trace contains them."""
    reported = {HEAD_START_KEY: trace[HEAD_START_KEY]} if HEAD_START_KEY in trace else {}
    place = trace.get("distributedInfo")
    return {**(place if isinstance(place, dict) else {}), **reported}


def _rank_events(rank: int, events: list[Mapping[str, Any]], later_us: float) -> Iterator[Document]:
    process = rank + 1
    yield _metadata(process, 0, "process_name", {"name": f"rank {rank}"})
    yield _metadata(process, 0, "process_sort_index", {"sort_index": rank})
    named = (event for event in events if event["name"] == "thread_name")
    names = {_thread(event): event.get("args", {}).get("name") for event in named}
    used = dict.fromkeys(_thread(event) for event in events if event["ph"] != "M")
    # Kineto puts streams into processes named after devices; here they come below the rank's threads.
    ordered = sorted(used, key=lambda thread: (str(names.get(thread, thread[1])).startswith("stream"), str(thread)))
    threads = {thread: process * _THREADS_PER_RANK + number for number, thread in enumerate(ordered)}
    for number, thread in enumerate(ordered):
        yield _metadata(process, threads[thread], "thread_name", {"name": str(names.get(thread, thread[1])).strip()})
        yield _metadata(process, threads[thread], "thread_sort_index", {"sort_index": number})
    for event in events:
        if event["ph"] != "M":
            moved = {**event, "pid": process, "tid": threads[_thread(event)], "ts": event.get("ts", 0.0) + later_us}
            yield moved | ({"id": _own_id(rank, event["id"])} if "id" in event else {})


def _thread(event: Mapping[str, Any]) -> tuple[object, object]:
    return event.get("pid"), event.get("tid")


def _own_id(rank: int, given: object) -> int | str:
    return rank * _IDS_PER_RANK + given if isinstance(given, int) else f"{rank}.{given}"


def _metadata(process: int, thread: int, name: str, values: Document) -> Document:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": values}
