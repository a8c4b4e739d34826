"""Events of a trace: files, boundaries between steps, waits of the host, and names of collectives."""

import pytest

from pytest_aorta.result.trace.kineto import (
    collective_of,
    events_and_boundaries,
    find_blocking_call,
    steps_alone,
)
from tests.unit.kineto_traces import BACKWARD, boundary, event, kernel, overlap_with_host, trace

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


LAUNCH = event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=9)


def blocking_call_among(*events):
    return find_blocking_call(trace(boundary(0, 1, 50), LAUNCH, *events, boundary(100, 2, 150)))


def test_step_without_a_wait_for_the_device_has_no_blocking_call():
    assert blocking_call_among(event("cuda_runtime", "cudaEventQuery", 10, 40)) is None


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaFree",
        "hipStreamSynchronize",
        "cuMemcpyDtoH_v2",
        "hipMemcpyWithStream",
    ],
)
def test_call_that_waits_for_the_device_is_blocking(name):
    assert blocking_call_among(event("cuda_runtime", name, 10, 40)) == name


def test_longest_blocking_call_is_named_with_its_outermost_operator():
    operators = event("cpu_op", "aten::item", 20, 30), event("cpu_op", "aten::_local_scalar_dense", 21, 28)
    short = event("cuda_runtime", "cudaEventSynchronize", 10, 2)
    long = event("cuda_runtime", "cudaStreamSynchronize", 22, 20)
    assert blocking_call_among(*operators, short, long) == "cudaStreamSynchronize in aten::item"


def test_wait_outside_the_steps_or_of_a_thread_that_launches_nothing_does_not_block():
    after = event("cuda_runtime", "cudaDeviceSynchronize", 120, 40)
    watchdog = event("cuda_runtime", "cudaEventSynchronize", 10, 40, BACKWARD + 7)
    assert blocking_call_among(after, watchdog) is None


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("", ALL_GATHER), "all_gather"),
        (("", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"), "reduce_scatter"),
        (("", "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL"), "all_reduce"),
        (("", "ncclDevKernel_Broadcast_RING_LL"), "broadcast"),
        (("", "ncclDevKernel_SendRecv"), "send_recv"),
        (("all_to_allv", "ncclDevKernel_SendRecv"), "all_to_all"),
        (("_allgather_base", "ncclDevKernel_Generic_1"), "all_gather"),
        (("reduce_scatter_tensor_coalesced", "ncclDevKernel_Generic_4"), "reduce_scatter"),
        (("", "ncclDevKernel_Generic_4"), "other"),
        (("", "ncclDevKernel_Reduce_Sum"), "other"),
        (("", "ncclSymkDevKernel_AllGather_LL"), "all_gather"),
        (("gloo:all_to_all",), "all_to_all"),
        (("gloo:barrier",), "other"),
    ],
)
def test_collective_is_what_was_asked_for_or_what_the_kernel_says(names, kind):
    assert collective_of(*names) == kind
