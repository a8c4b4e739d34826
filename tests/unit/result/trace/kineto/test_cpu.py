"""Traces of known operators and of gloo's work, read into lanes."""

import pytest

from pytest_aorta.result.trace.kineto import overlap_of_cpu
from tests.unit.kineto_traces import BACKWARD, GLOO, boundary, event, families, totals_ms, trace


def on_cpu(*events):
    return overlap_of_cpu(trace(boundary(0), *events, boundary(100)))


def test_compute_of_a_cpu_rank_is_its_training_threads_outermost_operators():
    (step,) = on_cpu(
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 10, 60),
        event("cpu_op", "MmBackward0", 12, 40),
        event("cpu_op", "aten::mm", 15, 30),
        event("cpu_op", "aten::resolve_conj", 16, 1),
        event("cpu_op", "aten::copy_", 50, 4),
        event("cpu_op", "aten::mm", 60, 20, BACKWARD),
        event("user_annotation", "FSDP::all_gather", 80, 15),
    ).steps
    assert (step.compute_ms, step.copy_ms) == (pytest.approx(0.030), pytest.approx(0.004))


def test_communication_of_a_cpu_rank_is_its_gloo_threads_work():
    (step,) = on_cpu(
        event("cpu_op", "c10d::_allgather_base_", 5, 3),
        event("user_annotation", "gloo:all_gather", 10, 40, GLOO),
        event("cpu_op", "aten::copy_", 45, 5, GLOO),
        event("cpu_op", "aten::mm", 20, 20),
    ).steps
    assert step.collectives["all_gather"].total_ms == pytest.approx(0.040)
    assert step.overlap_ratio == pytest.approx(0.5)


def test_operators_of_a_cpu_rank_count_without_those_that_they_call():
    found = on_cpu(
        event("cpu_op", "aten::linear", 10, 40),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 15, 35),
        event("cpu_op", "aten::addmm", 20, 25),
        event("cpu_op", "aten::copy_", 22, 5),
        event("cpu_op", "_c10d_functional::wait_tensor", 30, 10),
        event("cpu_op", "aten::mm", 60, 10),
        event("cpu_op", "aten::mm", 60, 10, BACKWARD),
        event("cpu_op", "aten::mm", 200, 10),
        event("user_annotation", "gloo:all_gather", 20, 20, GLOO),
    )
    assert families(found) == {
        "gloo:all_gather": (0.020, 1.0),
        "aten::linear": (0.015, 1.0),
        "aten::addmm": (0.010, 1.0),
        "aten::mm": (0.010, 1.0),
        "aten::copy_": (0.005, 1.0),
    }
    assert [(each.kind, each.num_bytes, each.ms) for each in found.collectives] == [("all_gather", None, [0.020])]


def test_waiting_within_an_operator_is_no_compute():
    (step,) = on_cpu(
        event("cpu_op", "aten::linear", 10, 40),
        event("cpu_op", "_c10d_functional::wait_tensor", 20, 20),
        event("user_annotation", "gloo:all_gather", 20, 20, GLOO),
    ).steps
    assert (step.compute_ms, step.overlap_ratio) == (pytest.approx(0.020), 0)


def test_reduce_scatter_that_gloo_serves_with_an_all_reduce_keeps_its_name():
    (step,) = on_cpu(
        event("cpu_op", "c10d::_reduce_scatter_base_", 5, 3),
        event("cpu_op", "c10d::allreduce_", 30, 3),
        event("user_annotation", "gloo:all_reduce", 8, 10, GLOO),
        event("user_annotation", "gloo:all_reduce", 34, 20, GLOO),
    ).steps
    assert totals_ms(step) == {"reduce_scatter": 0.01, "all_reduce": 0.02}


def test_work_that_no_known_call_asked_for_is_named_as_gloo_names_it():
    (step,) = on_cpu(
        event("cpu_op", "c10d::_reduce_scatter_base_", 5, 3),
        event("user_annotation", "gloo:all_reduce", 8, 10, GLOO),
        event("user_annotation", "gloo:all_reduce", 34, 20, GLOO),
    ).steps
    assert list(step.collectives) == ["all_reduce"]
