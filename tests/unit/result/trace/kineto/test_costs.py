"""Costs of a step in a trace that was written by hand."""

import pytest

from pytest_aorta.result.trace.kineto_costs import RecordedCall, costs_of_step
from pytest_aorta.result.trace.kineto_places import Moment
from pytest_aorta.result.trace.profiled_steps import Cost
from tests.unit.kineto_traces import BACKWARD, BASE_NS, ORIGIN_US, boundary, event, kernel, trace

RECORDED = [RecordedCall("0", 4, "Float")]


def costs_of(*events, **more):
    return costs_of_step(
        trace(boundary(0), *events, boundary(100)), lambda *_: None, lambda _: True, on_device=False, **more
    )


@pytest.mark.parametrize(
    ("name", "kinds", "tensors", "kind"),
    [
        ("_c10d_functional::all_gather_into_tensor", ["float"], [[6]], "all_gather"),
        ("_c10d_functional::all_gather_into_tensor_coalesced", ["TensorList"], [[[2], [4]]], "all_gather"),
        # This one is given its result.
        ("_c10d_functional::all_gather_into_tensor_out", ["float"] * 2, [[6], [24]], "all_gather"),
        ("c10d::allgather_", ["", "TensorList"], [[], [[6]]], "all_gather"),
        ("c10d::reduce_scatter_", ["TensorList", ""], [[[6]], []], "reduce_scatter"),
        ("c10d::reduce_", ["TensorList"], [[[24]]], "reduce"),
    ],
)
def test_a_collective_moves_the_bytes_of_its_result_or_of_the_tensors_of_all_ranks(name, kinds, tensors, kind):
    call = event("cpu_op", name, 20, 10, **{"Input type": kinds, "Input Dims": tensors})
    [row] = costs_of(call, recorded=RECORDED).collectives
    assert (row.kind, row.calls, row.group_size, row.bytes) == (kind, 1, 4, 96)


@pytest.mark.parametrize("name", ["send", "recv_"])
def test_a_message_of_gloo_has_the_type_of_the_annotation_that_begins_within_it(name):
    tensors = {"Input type": ["TensorList"], "Input Dims": [[[8, 3]]]}
    sent = {"Input type": ["c10::BFloat16"], "Input Dims": [[8, 3]]}
    begun = event("user_annotation", f"gloo:{name.rstrip('_')}", 25, 40, **sent)  # which ends with the message
    [row] = costs_of(event("cpu_op", f"c10d::{name}", 20, 10, **tensors), begun).collectives
    assert (row.kind, row.calls, row.dtype, row.bytes) == ("send_recv", 1, "bfloat16", 48)


def test_unnoted_functional_collective_of_a_simulated_rank_leaves_others_known():
    gather = event("cpu_op", "c10d::_allgather_base_", 20, 5, **{"Input type": ["float"], "Input Dims": [[24]]})
    norm = event("cpu_op", "_c10d_functional::all_reduce", 40, 20, **{"Input type": ["float"], "Input Dims": [[1]]})
    inner = event("cpu_op", "c10d::allreduce_", 45, 5, **{"Input type": ["TensorList"], "Input Dims": [[[1]]]})
    rows = costs_of(gather, norm, inner, recorded=RECORDED).collectives
    assert [(row.kind, row.group_size, row.bytes) for row in rows] == [("all_gather", 4, 96), ("all_reduce", None, 4)]


def test_batches_that_a_step_takes_from_workers_are_no_operators_of_it():
    # Batches that came early are unpacked with the one that was asked for.
    loader = "enumerate(DataLoader)#{}.__next__"
    taken = event("user_annotation", loader.format("_MultiProcessingDataLoaderIter"), 20, 20)
    made = event("user_annotation", loader.format("_SingleProcessDataLoaderIter"), 50, 20)
    calls = [event("cpu_op", name, start, 5) for name, start in (("aten::set_", 30), ("aten::stack", 60))]
    assert costs_of(taken, made, *calls).operators == {"aten::stack": 1}


def op(name, begin_us, thread=None, number=None, forward=0):
    known = {} if number is None else {"Sequence number": number, "Fwd thread id": forward}
    return event("cpu_op", name, begin_us, 2, **({} if thread is None else {"thread": thread}), **known)


def node(begin_us, number=None, thread=BACKWARD):
    """Return a node of autograd that runs for 10 microseconds."""
    known = {} if number is None else {"Sequence number": number, "Fwd thread id": 1}
    return event("cpu_op", "autograd::engine::evaluate_function: AddBackward0", begin_us, 10, thread, **known)


def of_fsdp(begin_us, name, thread=BACKWARD):
    return event("user_annotation", f"FSDP::all_gather ({name})", begin_us, 10, thread)


# What the main thread runs from these microseconds on.
RUNNING = {
    10: ("", "train.py:3"),
    20: ("layers.0.mlp", "model.py:8"),
    30: ("layers.1.mlp", "model.py:8"),
    40: ("layers.2.mlp", "model.py:8"),
    50: ("", "train.py:4"),
    80: ("layers.0", "model.py:9"),
    90: ("", "train.py:5"),
}
MOMENTS = [Moment(round(BASE_NS + (ORIGIN_US + at) * 1000), *what) for at, what in RUNNING.items()]
LAYERS = [op("x::a", begin, number=begin) for begin in (21, 31, 41)]


@pytest.mark.parametrize(
    ("events", "places"),
    [
        ([op("x::a", 12)], {"train.py:3": 1}),
        ([op("x::a", 6)], {}),  # before the first line
        ([op("x::a", 22)], {"layers.0.mlp at model.py:8": 1}),
        (LAYERS, {"layers.*.mlp at model.py:8": 3}),
        (
            [*LAYERS, op("x::a", 35), op("x::a", 91)],
            {"layers.1.mlp at model.py:8": 2, "train.py:5": 1, "layers.*.mlp at model.py:8": 2},
        ),
        (
            [op("x::b", 31, number=7), node(55, 7), op("x::a", 57, BACKWARD)],
            {"backward of layers.1.mlp at model.py:8": 1},
        ),
        # The second operator with the number has made the node.
        (
            [op("x::b", 21, number=7), op("x::b", 31, number=7), node(55, 7), op("x::a", 57, BACKWARD)],
            {"backward of layers.1.mlp at model.py:8": 1},
        ),
        ([node(55), op("x::a", 57, BACKWARD)], {"backward at train.py:4": 1}),
        ([node(75, 7), op("x::a", 81, BACKWARD)], {"recomputation in layers.0 at model.py:9": 1}),
        ([node(55, 7), of_fsdp(55, "layers.1"), op("x::a", 57, BACKWARD)], {"backward of layers.1 at train.py:4": 1}),
        ([of_fsdp(20, "0", 100), op("x::a", 22)], {"module 0 at model.py:8": 1}),
    ],
)
def test_operators_have_the_places_of_modules_and_lines(events, places):
    assert costs_of(*events, moments=MOMENTS).places[Cost.OPERATORS].get("x::a") == places


def test_kernels_copies_and_waits_have_the_places_of_the_calls_that_caused_them():
    calls = [("cudaLaunchKernel", 21, 1), ("cudaMemcpyAsync", 31, 2), ("cudaStreamSynchronize", 33, 3)]
    launched = [event("cuda_runtime", name, begin, 1, correlation=number) for name, begin, number in calls]
    copy = event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 70, 1, 7, correlation=2)
    step = trace(boundary(0, 8, 60), *launched, kernel("gemm", 65, 5, correlation=1), copy, boundary(100, 9, 99))
    costs = costs_of_step(step, lambda *_: None, lambda _: True, on_device=True, moments=MOMENTS)
    [copied] = costs.host_copies
    assert costs.places[Cost.HOST_COPIES] == {copied: {"layers.1.mlp at model.py:8": 1}}
    assert costs.places[Cost.HOST_SYNCS] == {"cudaStreamSynchronize": {"layers.1.mlp at model.py:8": 1}}
    assert {"layers.0.mlp at model.py:8": 1} in costs.places[Cost.KERNELS].values()
