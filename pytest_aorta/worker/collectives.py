"""The collectives of a rank's steps: how many, of which groups, and how long each step waits in them.

Collectives make step times equal on all ranks, so step times do not show a straggler. But a straggler arrives last, so
its waits are the shortest. On CUDA the times come from NCCL's flight recorder, which brackets each collective with
events if TORCH_NCCL_ENABLE_TIMING is set. On CPU, where collectives block, a rank waits whenever it does not compute.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from pytest_aorta.common.clock import time
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.kineto import DTYPES
from pytest_aorta.result.trace.kineto_costs import RecordedCall
from pytest_aorta.result.trace.rank_files import Arrivals, flight_records
from pytest_aorta.worker.accelerator import on_accelerator
from pytest_aorta.worker.own_plan import own_folder
from pytest_aorta.worker.simulation import is_simulated, requested_calls
from pytest_aorta.worker.torch_private import c10d

# NCCL's watchdog checks every 100 ms which collectives have ended.
_RETIRED_WITHIN_S = 2.0
# A collective that nobody waits for may go on for longer.
_LEFT_WITHIN_S = 1.0
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
    folder = own_folder()
    entries = flight_records("fr")
    if folder is None or entries is None:
        return
    document = Arrivals(
        began_ns=list(began_ns),
        ended_ns=list(ended_ns),
        known_from_ns=_known_from_ns(entries) if entries else max(ended_ns, default=0),
        arrived_ns={_name(entry): entry["time_created_ns"] for entry in entries if not entry["is_p2p"]},
    )
    write_json(folder / ARRIVALS_FILE, to_builtins(document), durable=False)


def _known_from_ns(entries: Sequence[dict[str, Any]]) -> int:
    """Return the moment from which a record has every collective; 0 if it has all."""
    # The record is a ring: its first entry has the number 0 until a later entry replaces the first entry.
    return min(entry["time_created_ns"] if entry["record_id"] else 0 for entry in entries)


def _name(entry: dict[str, Any]) -> str:
    """Return a name of a collective that is the same on every rank, with the name and description of its group."""
    return f"{' '.join(entry['process_group'])}/{entry['collective_seq_id']}/{entry['profiling_name']}"


def leave_collectives() -> None:
    """Wait until the threads of CPU backends have left every collective that has ended, for a moment at the most.

    Such a thread completes a collective's future before it tells torch's profiler of the end. A profiler that stops in
    between, as after the backward pass of DDP on a busy machine, is written to when its memory is free.
    """
    _retired("fr", _LEFT_WITHIN_S, 0.001)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return NCCL's record of this rank once the watchdog has retired every collective; empty if torch has no NCCL."""
    return _retired("nccl", _RETIRED_WITHIN_S, 0.02)


def _retired(recorder: str, within_s: float, every_s: float) -> list[dict[str, Any]]:
    """Return a recorder's entries once every collective is retired, or after a time, looking again and again."""
    deadline_s = time.monotonic() + within_s
    while entries := flight_records(recorder):
        if all(entry.get("retired") for entry in _without_parts(entries)) or time.monotonic() > deadline_s:
            return entries
        time.sleep(every_s)
    return []


def _without_parts(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the sends and receives of batches, which never retire and never get a duration.

    Only the batch does, as ``nccl:coalesced`` (https://github.com/pytorch/pytorch/issues/137969).
    """
    has_batches = any(entry.get("profiling_name") == _BATCH for entry in entries)
    return [
        entry
        for entry in entries
        if not (has_batches and entry.get("is_p2p")) or entry.get("retired") or entry["profiling_name"] == _BATCH
    ]


def calls_by_step(spans_ns: Sequence[tuple[int, int]]) -> float | None:
    """Return the mean number of collectives that this rank began in steps; None if torch has not recorded them.

    ``spans_ns`` are the begin and end of each step by ``time.time_ns``.
    """
    entries = _entries()
    if not entries or not spans_ns:
        return 0.0
    created_ns = sorted(entry["time_created_ns"] for entry in entries if not entry["is_p2p"])
    known_from_ns = _known_from_ns(entries)
    covered = [span for span in spans_ns if span[0] >= known_from_ns]
    counts = [bisect_right(created_ns, end) - bisect_left(created_ns, begin) for begin, end in covered]
    return fmean(counts) if counts else None


def _entries() -> list[dict[str, Any]]:
    """Return torch's record of the collectives of any backend."""
    return [entry for recorder in ("fr", "nccl") for entry in flight_records(recorder) or ()]


def reduced_types(since_ns: int) -> set[str]:
    """Return the types of floating numbers that this rank has reduced with others since a moment."""
    entries = [one for one in _entries() if "reduce" in one["profiling_name"] and one["time_created_ns"] >= since_ns]
    kinds = {DTYPES.get(kind, kind) for entry in entries for kind in entry["input_dtypes"]}
    return {kind for kind in kinds if "float" in kind}


def recorded_calls(began_ns: int, ended_ns: int, device: torch.device) -> list[RecordedCall]:
    """Return the collectives that this rank began in a stretch of time, in order, by the recorder of CPU backends."""
    if is_simulated():
        return requested_calls(began_ns, ended_ns)
    if on_accelerator(device):
        return []  # NCCL's record of a collective is a part of the trace
    sizes = {str(name): group.size() for group, name in c10d._world.pg_names.items()}
    return [
        RecordedCall(
            group := str(entry["process_group"][0]),
            sizes.get(group),
            str(next(iter(entry["input_dtypes"] or entry["output_dtypes"]), "")),
        )
        for entry in flight_records("fr") or ()
        if not entry["is_p2p"] and began_ns <= entry["time_created_ns"] <= ended_ns
    ]
