"""How long this rank was in collectives in each step, from its arrival at each of them to its end.

Collectives make step times equal, so that a slow rank can't be told by its steps; but it arrives last, and is the
one that waits least. On CUDA the times are those of NCCL's flight recorder, which brackets each collective with
events of its own where TORCH_NCCL_ENABLE_TIMING is set. On CPU, where collectives block, what a rank did not spend
computing it spent waiting.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

# NCCL's watchdog looks every 100 ms at what has ended.
_RETIRED_WITHIN_S = 2.0


def waits_of_steps_ms(collectives: Sequence[dict[str, Any]], began_ns: Sequence[int], ended_ns: int) -> list[float]:
    """Milliseconds in collectives of each step that the record holds whole: the last ones, where it was too small.

    ``began_ns`` is when the host entered each step, ``ended_ns`` when it left the last, on the clock of
    ``time.time_ns``. Steps before the first recorded collective are left out, and all of them where a collective
    within them has no duration.
    """
    created_ns = [entry["time_created_ns"] for entry in collectives]
    if not created_ns or not began_ns:
        return []
    # The oldest entry that is left may be from the middle of its step.
    first = 0 if min(created_ns) < began_ns[0] else bisect_right(began_ns, min(created_ns))
    sums_ms = [0.0] * len(began_ns)
    for entry, created in zip(collectives, created_ns, strict=True):
        step = bisect_right(began_ns, created) - 1
        if step < first or created > ended_ns:
            continue
        if entry.get("duration_ms") is None:
            return []
        sums_ms[step] += entry["duration_ms"]
    return sums_ms[first:]


def recorded_collectives() -> list[dict[str, Any]]:
    """NCCL's record of this rank, once its watchdog has seen every collective end; empty without NCCL's timing."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    deadline_s = time.monotonic() + _RETIRED_WITHIN_S
    while True:
        entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        if all(entry.get("retired") for entry in entries) or time.monotonic() > deadline_s:
            return entries
        time.sleep(0.02)
