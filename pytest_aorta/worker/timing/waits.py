"""The time that this rank spends in collectives in each step, from its arrival at each collective to its end.

Collectives make step times equal on all ranks, so step times do not show a straggler. But a straggler arrives last, so
its waits are the shortest. On CUDA the times come from NCCL's flight recorder, which brackets each collective with
events if TORCH_NCCL_ENABLE_TIMING is set. On CPU, where collectives block, a rank waits whenever it does not compute.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.arrivals import Arrivals

# NCCL's watchdog checks every 100 ms which collectives have ended.
_RETIRED_WITHIN_S = 2.0
_BATCH = "nccl:coalesced"


def waits_of_steps_ms(
    collectives: Sequence[dict[str, Any]], began_ns: Sequence[int], ended_ns: Sequence[int]
) -> list[float]:
    """Return the milliseconds spent in collectives, for each step that the record covers completely.

    Collectives between steps, e.g. of a loss for a log, are part of no step. A record that is too small covers only the
    last steps. Steps before the first recorded collective are left out; if any collective within the covered steps has
    no duration, the result is empty. Parts of a batch of sends and receives do not count: the recorder has one entry
    with a duration for the batch.

    Args:
        collectives: entries of NCCL's flight recorder.
        began_ns: when the host entered each step, on the clock of ``time.time_ns``.
        ended_ns: when the host left each step.
    """
    collectives = _without_parts(collectives)
    created_ns = [entry["time_created_ns"] for entry in collectives]
    if not created_ns or not began_ns:
        return []
    # The oldest remaining entry may be from the middle of its step.
    first = 0 if min(created_ns) < began_ns[0] else bisect_right(began_ns, min(created_ns))
    sums_ms = [0.0] * len(began_ns)
    for entry, created in zip(collectives, created_ns, strict=True):
        step = bisect_right(began_ns, created) - 1
        if step < first or created > ended_ns[step]:
            continue
        if entry.get("duration_ms") is None:
            return []
        sums_ms[step] += entry["duration_ms"]
    return sums_ms[first:]


def leave_arrivals(began_ns: Sequence[int], ended_ns: Sequence[int]) -> None:
    """Write this rank's steps and its arrivals at collectives into the rank's folder, if the launch names one."""
    folder = os.environ.get(variables.RANK_FOLDER)
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if not folder or dump is None:
        return
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    # The record is a ring: its first entry has the number 0 until a later entry replaces the first entry.
    is_whole = any(entry["record_id"] == 0 for entry in entries)
    last_ns = max(ended_ns, default=0)
    document = Arrivals(
        began_ns=list(began_ns),
        ended_ns=list(ended_ns),
        known_from_ns=0 if is_whole else min((entry["time_created_ns"] for entry in entries), default=last_ns),
        arrived_ns={_name(entry): entry["time_created_ns"] for entry in entries if not entry["is_p2p"]},
    )
    write_json(Path(folder) / ARRIVALS_FILE, to_builtins(document), durable=False)


def _name(entry: dict[str, Any]) -> str:
    """Return a name of a collective that is the same on every rank."""
    return f"{entry['process_group'][0]}/{entry['collective_seq_id']}/{entry['profiling_name']}"


def recorded_collectives() -> list[dict[str, Any]]:
    """Return NCCL's record of this rank once the watchdog has retired every collective; empty if torch has no NCCL."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    deadline_s = time.monotonic() + _RETIRED_WITHIN_S
    while True:
        entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        if all(entry.get("retired") for entry in _without_parts(entries)) or time.monotonic() > deadline_s:
            return entries
        time.sleep(0.02)


def _without_parts(entries: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Leave out the sends and receives of batches, which never retire and never get a duration.

    Only the batch does, as ``nccl:coalesced`` (https://github.com/pytorch/pytorch/issues/137969).
    """
    if not any(entry.get("profiling_name") == _BATCH for entry in entries):
        return entries
    return [
        entry
        for entry in entries
        if not entry.get("is_p2p") or entry.get("retired") or entry["profiling_name"] == _BATCH
    ]
