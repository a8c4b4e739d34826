"""The step's graph of streams in a trace that was written by hand."""

import pytest

from pytest_aorta.result.trace.kineto_costs import costs_of_step
from pytest_aorta.result.trace.kineto_graph import MARK
from tests.unit.kineto_traces import BACKWARD, TRAINING, boundary, event, trace

GATHER, REDUCE = "c10d::_allgather_base_", "c10d::allreduce_"
FUNCTIONAL = "_c10d_functional::all_gather_into_tensor"


def said(begin, text, thread=TRAINING, duration=0.5):
    return event("user_annotation", f"{MARK} {text}", begin, duration, thread)


def op(begin, name="aten::mm", thread=TRAINING, is_async=False, dims=(4,)):
    flag = {"Input type": ["float", "Scalar"], "Input Dims": [[*dims], []], "Concrete Inputs": ["", str(is_async)]}
    return event("cpu_op", name, begin, 0.5, thread, **flag)


def backward(begin, duration, thread=BACKWARD):
    return event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin, duration, thread)


# What a step does -> the stream of each node, and what it waits for.
STEPS = {
    "a call that the host waits for runs on its stream": (
        [said(10, "on 0"), op(12), op(14, REDUCE), op(16)],
        [("compute", []), ("compute", [0]), ("compute", [1])],
    ),
    "a stream that waits for another one": (
        [
            said(10, "on 0"),
            op(12),
            said(14, "waits-stream 1 0"),
            said(16, "on 1"),
            op(18, GATHER),
            said(20, "on 0"),
            op(22),
            said(24, "waits-stream 0 1"),
            op(26),
        ],
        [("compute", []), ("all-gather", [0]), ("compute", [0]), ("compute", [1, 2])],
    ),
    "an event": (
        [
            said(10, "on 1"),
            op(12, GATHER),
            said(14, "records 7 1"),
            op(15, GATHER),
            said(16, "on 0"),
            said(18, "waits-event 0 7"),
            op(20),
        ],
        [("compute", []), ("compute", [0]), ("stream 1", [0])],
    ),
    "a work that is waited for": (
        [
            said(10, "on 0"),
            said(12, "requests 5", duration=4),
            op(13, REDUCE, is_async=True),
            op(18),
            said(20, "waits-work 5"),
            op(22),
        ],
        [("all-reduce", []), ("compute", []), ("compute", [0, 1])],
    ),
    "what C++ reduces is waited for after the backward pass": (
        [
            said(10, "on 0"),
            backward(12, 20),
            op(14, thread=BACKWARD),
            op(16, REDUCE, BACKWARD, is_async=True),
            op(18, thread=BACKWARD),
            op(40),
        ],
        [("compute", []), ("all-reduce", [0]), ("compute", [0]), ("compute", [1, 2])],
    ),
    "marks of a thread whose events come before": (
        [said(30, "on 1", BACKWARD), op(32, GATHER, BACKWARD), said(10, "on 0"), op(12), op(50)],
        [("compute", []), ("all-gather", []), ("compute", [0])],
    ),
    "one communicator in order": (
        [said(10, "on 1"), op(12, GATHER), said(14, "on 2"), op(16, GATHER)],
        [("compute", []), ("all-gather", [0])],
    ),
    "the wait for a functional collective": (
        [said(10, "on 0"), op(12, FUNCTIONAL), op(14), op(16, "_c10d_functional::wait_tensor"), op(18)],
        [("all-gather", []), ("compute", []), ("compute", [0, 1])],
    ),
    "a value that the host reads": (
        [said(10, "on 0"), op(12), op(14, "aten::_local_scalar_dense"), said(16, "on 1"), op(18, GATHER)],
        [("compute", []), ("all-gather", [0])],
    ),
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("order", [1, -1])
def test_nodes_wait_for_what_the_host_asked_them_to(case, order):
    events, nodes = STEPS[case]
    document = trace(boundary(0), *events[::order], boundary(100))
    costs = costs_of_step(document, lambda name, _: 8 if name == "aten::mm" else None, lambda _: True, on_device=False)
    assert costs.graph.problem == ""
    streams = costs.graph.streams
    assert [(streams[node.stream], node.after) for node in costs.graph.nodes] == nodes


def test_step_without_marks_says_so():
    costs = costs_of_step(trace(boundary(0), op(12), boundary(100)), lambda *_: 8, lambda _: True, on_device=False)
    assert costs.graph.problem == "the streams of the step were not marked"
