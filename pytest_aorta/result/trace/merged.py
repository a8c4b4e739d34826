"""Merges the traces that ranks kept into one, on one clock, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.common.files import write_bytes
from pytest_aorta.result.trace.kineto import read_trace

Document: TypeAlias = dict[str, Any]

RANK_TRACE = "trace.json.gz"
MERGED_TRACE = "trace.json.gz"
# Rank, then thread: Perfetto takes a thread's number for one of the whole machine.
_THREADS_A_RANK = 10_000
_IDS_A_RANK = 1 << 32
_US_PER_NS = 1e-3


def merge_run(run_dir: Path) -> Path | None:
    """Merge what the ranks of a launch kept into ``run_dir/trace.json.gz``; None where no rank kept any.

    Raises:
        ValueError: a rank's file is no trace.
    """
    paths = {int(path.parent.name): path for path in run_dir.glob(f"ranks/*/{RANK_TRACE}")}
    if not paths:
        return None
    merged = merge_traces({rank: read_trace(paths[rank]) for rank in sorted(paths)})
    path = run_dir / MERGED_TRACE
    write_bytes(path, gzip.compress(json.dumps(merged).encode(), compresslevel=4))
    return path


def merge_traces(traces: Mapping[int, Mapping[str, Any]]) -> Document:
    """One trace of all ranks' traces: a process a rank, in order, with its threads and its device's streams.

    Times count from the earliest ``baseTimeNanoseconds``. Flows and asynchronous events keep to their rank.
    """
    base_ns = min(int(trace.get("baseTimeNanoseconds", 0)) for trace in traces.values())
    events: list[Document] = []
    for rank, trace in sorted(traces.items()):
        later_us = (int(trace.get("baseTimeNanoseconds", 0)) - base_ns) * _US_PER_NS
        events += _of_rank(rank, trace["traceEvents"], later_us)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "ranks": {str(rank): trace.get("distributedInfo", {}) for rank, trace in sorted(traces.items())},
        "traceEvents": events,
    }


def _of_rank(rank: int, events: list[Mapping[str, Any]], later_us: float) -> Iterator[Document]:
    process = rank + 1
    yield _metadata(process, 0, "process_name", {"name": f"rank {rank}"})
    yield _metadata(process, 0, "process_sort_index", {"sort_index": rank})
    names = {_place(event): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    places = dict.fromkeys(_place(event) for event in events if event["ph"] != "M")
    # Streams, which Kineto has in processes named after devices, come below the rank's threads.
    ordered = sorted(places, key=lambda place: (str(names.get(place, place[1])).startswith("stream"), str(place)))
    threads = {place: process * _THREADS_A_RANK + number for number, place in enumerate(ordered)}
    for number, place in enumerate(ordered):
        yield _metadata(process, threads[place], "thread_name", {"name": str(names.get(place, place[1])).strip()})
        yield _metadata(process, threads[place], "thread_sort_index", {"sort_index": number})
    for event in events:
        if event["ph"] != "M":
            moved = {**event, "pid": process, "tid": threads[_place(event)], "ts": event["ts"] + later_us}
            yield moved | ({"id": _own_id(rank, event["id"])} if "id" in event else {})


def _place(event: Mapping[str, Any]) -> tuple[object, object]:
    return event.get("pid"), event.get("tid")


def _own_id(rank: int, given: object) -> int | str:
    return rank * _IDS_A_RANK + given if isinstance(given, int) else f"{rank}.{given}"


def _metadata(process: int, thread: int, name: str, values: Document) -> Document:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": values}
