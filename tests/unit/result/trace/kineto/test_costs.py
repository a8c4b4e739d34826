"""Costs of a step in a trace that was written by hand."""

from __future__ import annotations

import pytest

from pytest_aorta.result.trace.kineto_costs import RecordedCall, costs_of_step
from tests.unit.kineto_traces import boundary, event, trace


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("all_gather_into_tensor", [[6]]),
        ("all_gather_into_tensor_coalesced", [[[2], [4]]]),
        ("all_gather_into_tensor_out", [[6], [24]]),  # which is given its result
    ],
)
def test_a_functional_all_gather_moves_the_bytes_of_its_result(name, tensors):
    kind = "TensorList" if name.endswith("coalesced") else "float"
    shapes = {"Input type": [kind] * len(tensors), "Input Dims": tensors}
    gather = event("cpu_op", f"_c10d_functional::{name}", 20, 10, **shapes)
    step = trace(boundary(0), gather, boundary(100))
    recorded = [RecordedCall("0", 4, "Float")]
    [row] = costs_of_step(step, lambda *_: None, on_device=False, recorded=recorded).collectives
    assert (row.kind, row.calls, row.group_size, row.bytes) == ("all_gather", 1, 4, 96)


def test_batches_that_a_step_takes_from_workers_are_no_operators_of_it():
    # Batches that came early are unpacked with the one that was asked for.
    loader = "enumerate(DataLoader)#{}.__next__"
    taken = event("user_annotation", loader.format("_MultiProcessingDataLoaderIter"), 20, 20)
    made = event("user_annotation", loader.format("_SingleProcessDataLoaderIter"), 50, 20)
    calls = [event("cpu_op", name, start, 5) for name, start in (("aten::set_", 30), ("aten::stack", 60))]
    step = trace(boundary(0), taken, made, *calls, boundary(100))
    assert costs_of_step(step, lambda *_: None, on_device=False).operators == {"aten::stack": 1}
