"""Traces in which the host waits for the device, or does not."""

from __future__ import annotations

import pytest

from pytest_aorta.result.trace.kineto import find_blocking_call
from tests.unit.kineto_traces import BACKWARD, boundary, event, trace

LAUNCH = event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=9)


def blocking_call_among(*events):
    return find_blocking_call(trace(boundary(0, 1, 50), LAUNCH, *events, boundary(100, 2, 150)))


def test_step_without_a_wait_for_the_device_has_no_blocking_call():
    assert blocking_call_among(event("cuda_runtime", "cudaEventQuery", 10, 40)) is None


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree",
             "hipStreamSynchronize", "cuMemcpyDtoH_v2", "hipMemcpyWithStream"],
)  # fmt: skip
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
