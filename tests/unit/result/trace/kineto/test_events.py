"""Boundaries between the steps of a trace: traces that lack them, and events outside them."""

from __future__ import annotations

import pytest

from pytest_aorta.result.trace.kineto import events_and_boundaries, steps_alone
from tests.unit.kineto_traces import boundary, kernel, overlap_with_host, trace

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_trace_without_two_boundaries_is_refused():
    with pytest.raises(ValueError, match=r"the trace has 1 annotations 'aorta::boundary'"):
        events_and_boundaries(trace(boundary(0)))


def test_boundary_whose_kernel_was_not_recorded_is_refused():
    lost = trace(boundary(0, 1, 50), boundary(30, 2, 150)[:2])
    with pytest.raises(ValueError, match="did not record the device"):
        overlap_with_host(lost)


def test_kept_trace_has_the_steps_alone_and_reads_the_same():
    meeting = kernel("ncclDevKernel_AllReduce_Sum", 20, 10)
    whole = trace(meeting, boundary(0, 1, 50), kernel(ALL_GATHER, 60, 30), boundary(30, 2, 150), kernel("late", 170, 5))
    alone = steps_alone(whole, on_device=True)
    names = [one["name"] for one in alone["traceEvents"]]
    assert meeting["name"] not in names
    assert "late" not in names
    assert {"process_name", ALL_GATHER, "cudaLaunchKernel"} <= set(names)
    assert overlap_with_host(alone) == overlap_with_host(whole)
