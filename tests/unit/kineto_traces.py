"""Chrome traces as Kineto writes them, of known events; times are in microseconds."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_aorta.result.trace.kineto import BOUNDARY, events_and_boundaries, learn_step, overlap_of_device
from pytest_aorta.result.trace.profiled_steps import Profile, StepOverlap

TRAINING, BACKWARD, GLOO = 100, 101, 200
# The origin is far from zero, as in real traces: microseconds since a recent moment, with nanoseconds as decimals.
ORIGIN_US = 4_423_687_156_865.729
BASE_NS = 1_790_857_026_000_000_000


def read_trace(path: Path) -> dict[str, Any]:
    """Return the document of a gzipped trace."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def event(category: str, name: str, begin_us: float, duration_us: float, thread: Any = TRAINING, **args: Any) -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": ORIGIN_US + begin_us,
        "dur": duration_us,
        "args": args,
    }


def boundary(begin_us: float, correlation: int | None = None, kernel_us: float = 0.0) -> list[dict]:
    """Return the annotation and, on a device, its launch and its kernel of one microsecond at ``kernel_us``."""
    mark = event("user_annotation", BOUNDARY, begin_us, 5)
    if correlation is None:
        return [mark]
    launch = event("cuda_runtime", "cudaLaunchKernel", begin_us + 2, 1, correlation=correlation)
    return [mark, launch, kernel("fill", kernel_us, 1, correlation=correlation)]


def kernel(name: str, begin_us: float, duration_us: float, stream: int = 7, **args: Any) -> dict:
    return event("kernel", name, begin_us, duration_us, stream, stream=stream, **args)


def trace(*events: dict | list[dict]) -> dict[str, Any]:
    flat = [one for entry in events for one in (entry if isinstance(entry, list) else [entry])]
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python3"}}
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": [named, *flat]}


def named(thread, name: str, process=1) -> dict:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def flow(phase: str, begin_us: float, thread) -> dict:
    return {
        "ph": phase,
        "id": 5,
        "cat": "ac2g",
        "name": "ac2g",
        "pid": 1,
        "tid": thread,
        "ts": ORIGIN_US + begin_us,
        "bp": "e",
    }


def rank_trace(later_ns: int = 0) -> dict:
    document = trace(
        named(TRAINING, "thread 100 (python3)"),
        named(7, "stream 7 ", process=0),
        boundary(0, 1, 50),
        event("user_annotation", "gloo:all_gather", 10, 20, GLOO),
        kernel("gemm", 60, 10) | {"pid": 0},
        flow("s", 2.0, TRAINING),
        flow("f", 60.0, 7) | {"pid": 0},
    )
    return document | {"baseTimeNanoseconds": BASE_NS + later_ns, "distributedInfo": {"rank": 0}}


def keep_traces(run_dir: Path, traces: Iterable[dict]) -> None:
    """Keep one trace per rank, as the ranks of a launch do."""
    for rank, document in enumerate(traces):
        folder = run_dir / "ranks" / str(rank)
        folder.mkdir(parents=True)
        (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))


def totals_ms(step: StepOverlap) -> dict[str, float]:
    """Return the time of each kind of collective in a step."""
    return {kind: round(time.total_ms, 6) for kind, time in step.collectives.items()}


def families(profile: Profile) -> dict[str, tuple[float, float]]:
    """Return the time and the calls of each family of kernels in a step."""
    return {family: (round(time.ms, 6), time.calls) for family, time in profile.kernels.items()}


def overlap_with_host(document: dict) -> Profile:
    """Return the breakdown of the steps of a trace that has host events too."""
    return overlap_of_device(document, learn_step(document), len(events_and_boundaries(document)[1]) - 1)
