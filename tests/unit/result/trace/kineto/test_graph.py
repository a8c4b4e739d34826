"""The step's graph of streams in a trace that was written by hand."""

import pytest

from pytest_aorta.result.trace.kineto_costs import costs_of_step
from pytest_aorta.result.trace.kineto_graph import MARK
from tests.unit.kineto_traces import BACKWARD, TRAINING, boundary, event, trace

GATHER, REDUCE = "c10d::_allgather_base_", "c10d::allreduce_"
FUNCTIONAL, READ = "_c10d_functional::all_gather_into_tensor", "aten::_local_scalar_dense"


def said(begin, text, thread=TRAINING, duration=0.5):
    return event("user_annotation", f"{MARK} {text}", begin, duration, thread)


def op(begin, name="aten::mm", thread=TRAINING, is_async=False, duration=0.5):
    flag = {"Input type": ["float", "Scalar"], "Input Dims": [[4], []], "Concrete Inputs": ["", str(is_async)]}
    return event("cpu_op", name, begin, duration, thread, **flag)


def backward(begin, duration, thread=BACKWARD):
    return event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin, duration, thread)


def graph_of(*events, formula=lambda *_: None):
    """Return the graph of a step with these events of the host."""
    return costs_of_step(trace(boundary(0), *events, boundary(100)), formula, lambda _: True, on_device=False).graph


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
        [
            said(10, "on 0"),
            said(12, "requests 5", duration=2),
            op(12.5, FUNCTIONAL),
            op(14),
            said(16, "waits-work 5"),
            op(18),
        ],
        [("all-gather", []), ("compute", []), ("compute", [0, 1])],
    ),
    "an operator that waits before it computes": (
        [
            said(10, "on 0"),
            said(12, "requests 5", duration=2),
            op(12.5, FUNCTIONAL),
            op(16, duration=5),
            said(17, "waits-work 5"),
            op(18),
        ],
        [("all-gather", []), ("compute", [0])],
    ),
    "a stream that waits for one that waits": (
        [
            said(10, "on 1"),
            op(12, GATHER),
            said(14, "waits-stream 2 1"),
            said(16, "waits-stream 3 2"),
            said(18, "on 3"),
            op(20),
        ],
        [("compute", []), ("stream 1", [0])],
    ),
    "an event of another step, for which the host waits": (
        [said(10, "on 1"), op(12, GATHER), said(14, "host-waits 7"), said(16, "on 2"), op(18)],
        [("compute", []), ("stream 1", [])],
    ),
    "all that the host waits for, once on each stream": (
        [said(10, "on 1"), op(12), op(13), said(14, "host-waits"), said(16, "on 2"), op(18), op(20)],
        [("compute", []), ("compute", [0]), ("stream 1", [1]), ("stream 1", [2])],
    ),
    "a count of an optimizer": (
        [
            said(10, "on 0"),
            op(12),
            event("user_annotation", "Optimizer.step#AdamW.step", 14, 4, TRAINING),
            op(15, READ),
            said(20, "on 1"),
            op(22, GATHER),
        ],
        [("compute", []), ("all-gather", [])],
    ),
    "a value that the host reads": (
        [said(10, "on 0"), op(12), op(14, READ), said(16, "on 1"), op(18, GATHER)],
        [("compute", []), ("all-gather", [0])],
    ),
    "a size that the device computes": (
        [said(10, "on 0"), op(12), op(14, "aten::nonzero"), said(16, "on 1"), op(18, GATHER)],
        [("compute", []), ("all-gather", [0])],
    ),
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("order", [1, -1])
def test_nodes_wait_for_what_the_host_asked_them_to(case, order):
    events, nodes = STEPS[case]
    graph = graph_of(*events[::order], formula=lambda name, _: 8 if name == "aten::mm" else None)
    assert graph.problem == ""
    assert [(graph.streams[node.stream], node.after) for node in graph.nodes] == nodes


def test_messages_have_the_other_rank():
    events = [said(12, "requests 5 3", duration=2), op(12.5, "c10d::send")]
    events += [said(15, "requests 6 4", duration=2), op(15.5, "c10d::recv_")]
    nodes = graph_of(said(10, "on 0"), *events).nodes
    assert [(node.name, node.sends_to, node.receives_from) for node in nodes] == [
        ("send_recv", 3, None),
        ("send_recv", None, 4),
    ]


def test_step_without_marks_says_so():
    assert "not marked" in graph_of(op(12), formula=lambda *_: 8).problem


@pytest.mark.parametrize(
    ("category", "name", "unseen"),
    [
        ("cpu_op", "symm_mem::fused_all_gather_matmul", "transfers of symmetric memory"),
        ("cuda_runtime", "cudaGraphLaunch", "operators of CUDA graphs"),
        ("cuda_runtime", "hipGraphLaunch", "operators of CUDA graphs"),
        ("user_annotation", "## Call CompiledFxGraph fabc ##", "kernels that inductor fused"),
    ],
)
def test_what_a_graph_lacks_is_named(category, name, unseen):
    hidden = event(category, name, 14, 0.5, TRAINING)
    assert graph_of(said(10, "on 0"), op(12), hidden, op(16, GATHER)).unseen == [unseen]
