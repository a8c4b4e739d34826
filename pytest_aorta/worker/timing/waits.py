"""The time that this rank spends in collectives in each step, from its arrival at each collective to the end.

Collectives make step times equal on all ranks, so step times do not show a straggler. But a straggler arrives last, so
its waits are the shortest. On CUDA the times come from NCCL's flight recorder, which brackets each collective with
events if TORCH_NCCL_ENABLE_TIMING is set. On CPU, where collectives block, a rank waits whenever it does not compute.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

# NCCL's watchdog checks every 100 ms which collectives have ended.
_RETIRED_WITHIN_S = 2.0


def waits_of_steps_ms(collectives: Sequence[dict[str, Any]], began_ns: Sequence[int], ended_ns: int) -> list[float]:
    """Return the milliseconds in collectives of each step that the record covers whole.

    A record that is too small covers only the last steps. Steps before the first recorded collective are left out; if
    any collective within the covered steps has no duration, the result is empty.

    Args:
        collectives: entries of NCCL's flight recorder.
        began_ns: when the host entered each step, on the clock of ``time.time_ns``.
        ended_ns: when the host left the last step.
    """
    created_ns = [entry["time_created_ns"] for entry in collectives]
    if not created_ns or not began_ns:
        return []
    # The oldest remaining entry may be from the middle of its step.
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
    """Return NCCL's record of this rank once the watchdog has retired every collective; empty without NCCL's timing."""
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
