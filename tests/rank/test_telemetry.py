"""Stream spans, and the line of telemetry of each step; on CPU."""

import json

import numpy as np
import pytest
import torch

from pytest_aorta.result.trace.overlap import overlap_of, union
from pytest_aorta.worker import StepTimer, StreamSpans, Telemetry, accelerator
from pytest_aorta.worker.workload import MAX_LINES, MAX_SEGMENTS
from tests.unit.builders import broken_rule, make_rank

CPU = torch.device("cpu")
MS = 1_000_000


class Clock:
    """A clock of the stream spans that advances by the work of a test alone."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def work(self, duration_ms: int) -> None:
        self.now_ns += duration_ms * MS


class LateHandle:
    """An asynchronous collective that ends a given time after its start."""

    def __init__(self, clock: Clock, duration_ms: int) -> None:
        self.clock, self.end_ns = clock, clock.now_ns + duration_ms * MS

    def wait(self) -> None:
        self.clock.now_ns = max(self.clock.now_ns, self.end_ns)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(accelerator, "time", made)
    return made


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_collective_that_compute_runs_beside_is_hidden_and_one_in_line_is_not(clock):
    spans = StreamSpans(CPU, every=1)
    for number, is_beside in enumerate((True, False)):
        with spans.step(number):
            transfer = spans.around(
                "all_gather", lambda is_async: LateHandle(clock, 10) if is_async else clock.work(20)
            )
            handle = transfer(is_beside)
            clock.work(1)
            with spans.span("compute"):
                clock.work(20)
            if handle is not None:
                handle.wait()
    beside, in_line = (spans.captures()[number].steps[0] for number in (0, 1))
    # On CPU the span lasts until the wait, longer than the collective.
    assert beside.collectives["all_gather"].total_ms == 21
    assert beside.overlap_ratio == pytest.approx(20 / 21)
    assert in_line.overlap_ratio == 0
    assert in_line.collectives["all_gather"].total_ms == in_line.compute_ms == 20
    assert in_line.step_ms == 41
    assert all(broken_rule(step) is None for step in (beside, in_line))


def test_second_wait_does_not_lengthen_a_span(clock):
    spans = StreamSpans(CPU, every=1)
    with spans.step(0):
        handle = spans.around("all_reduce", lambda _: LateHandle(clock, 1))(True)
        handle.wait()
        clock.work(30)
        handle.wait()
    (step,) = spans.captures()[0].steps
    assert (step.comm_ms, step.step_ms) == (1, 31)


def test_what_a_stream_waits_for_is_no_compute_and_a_second_hold_is_none(clock):
    spans = StreamSpans(CPU, every=2)
    for number in range(3):
        with spans.step(number), spans.span("compute"):
            clock.work(1)
            spans.hold()
            clock.work(2)
            spans.hold()
            with spans.span("all_gather"):
                clock.work(4)
            spans.resume()
            clock.work(8)
            spans.resume()
            # A hold that is not resumed ends with the step.
            spans.hold()
            clock.work(16)
    captures = spans.captures()
    assert list(captures) == [0, 2]
    for capture in captures.values():
        (step,) = capture.steps
        assert len(capture.timeline["compute"]) == 2
        assert step.hidden_comm_ms == 0
        assert (step.compute_ms, step.comm_ms, step.step_ms) == (1 + 8, 4, 31)


@pytest.mark.parametrize(("every", "recorded"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (4, [0, 4]), (10, [0])])
def test_spans_are_of_every_so_many_th_step(every, recorded):
    spans = StreamSpans(CPU, every)
    for number in range(6):
        with spans.step(number), spans.span("compute"):
            pass
    with spans.span("compute"):
        pass
    assert list(spans.captures()) == recorded


def test_line_has_what_is_known_of_its_step(tmp_path):
    capture = overlap_of({"compute": union([(0, 6 * MS)]), "all_gather": union([(4 * MS, 8 * MS)])}, [(0, 10 * MS)])
    result = make_rank([10.0, 11.0], loss=[2.0, 1.5], grad_norm=[0.5, 0.4])
    path = Telemetry({"lr": [0.1, 0.1]}, {1: capture}).write(tmp_path, result)
    assert path == tmp_path / "telemetry.jsonl"
    first, second = lines_of(path)
    assert first == {"step": 0, "step_time_ms": 10.0, "loss": 2.0, "grad_norm": 0.5, "lr": 0.1}
    assert second == {
        "step": 1,
        "step_time_ms": 11.0,
        "loss": 1.5,
        "grad_norm": 0.4,
        "lr": 0.1,
        "stream_ms": {"compute": 6.0, "copy": 0.0, "all_gather": 4.0},
        "utilisation": 0.6,
        "hidden_comm_ms": 2.0,
        "exposed_comm_ms": 2.0,
        "hidden_ms": {"all_gather": 2.0},
        "segments": {"compute": [[0.0, 6.0]], "all_gather": [[4.0, 8.0]]},
    }


def test_profiled_steps_follow_the_measured_ones_where_a_workload_captures_none(tmp_path):
    capture = overlap_of({"compute": union([(0, 6 * MS)]), "all_gather": union([(4 * MS, 8 * MS)])}, [(0, 10 * MS)])
    result = make_rank([11.0]).with_profile(capture)
    measured, profiled = lines_of(Telemetry({"lr": [0.1]}).write(tmp_path, result))
    assert measured == {"step": 0, "step_time_ms": 11.0, "lr": 0.1}
    assert profiled == {
        "step": 1,
        "step_time_ms": 10.0,
        "stream_ms": {"compute": 6.0, "copy": 0.0, "all_gather": 4.0},
        "utilisation": 0.6,
        "hidden_comm_ms": 2.0,
        "exposed_comm_ms": 2.0,
        "hidden_ms": {"all_gather": 2.0},
    }
    assert len(lines_of(Telemetry(captures={0: capture}).write(tmp_path, result))) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.1], "1 values for 2 steps"),
        ([0.5, float("nan")], "the value of step 1 is nan; record finite numbers"),
        ([0.5, float("inf")], "the value of step 1 is inf; record finite numbers"),
        ([0.5, torch.tensor(float("nan"))], "the value of step 1 is nan; record finite numbers"),
    ],
)
def test_series_of_another_length_or_not_finite_is_refused_and_leaves_no_file(tmp_path, values, said):
    with pytest.raises(ValueError, match=f"^telemetry of lr: {said}"):
        Telemetry({"lr": values}).write(tmp_path, make_rank([1.0, 2.0]))
    assert list(tmp_path.iterdir()) == []


def test_series_may_be_tensors_and_numbers_of_numpy(tmp_path):
    series = {"lr": [torch.tensor(0.5), torch.tensor(0.25)], "scale": list(np.float32([1.0, 2.0])), "batch": [8, 16]}
    lines = lines_of(Telemetry(series).write(tmp_path, make_rank([1.0, 2.0])))
    assert [(line["lr"], line["scale"], line["batch"]) for line in lines] == [(0.5, 1.0, 8.0), (0.25, 2.0, 16.0)]


def test_loss_of_some_steps_only_is_left_out(tmp_path):
    path = Telemetry().write(tmp_path, make_rank([1.0, 1.0], loss=[2.0]))
    assert lines_of(path) == [{"step": 0, "step_time_ms": 1.0}, {"step": 1, "step_time_ms": 1.0}]


def test_steps_of_microseconds_are_timed():
    timer, spans = StepTimer(CPU), StreamSpans(CPU, every=10)
    for number in range(20_000):
        with timer.step(), spans.step(number), spans.span("compute"):
            pass
    times_ms = timer.step_times_ms()
    assert len(times_ms) == 20_000
    assert all(time_ms > 0 for time_ms in times_ms)
    assert sorted(times_ms)[10_000] < 0.05


def test_file_is_bounded_however_crowded_the_steps_are(tmp_path):
    rows = union([(2 * place, 2 * place + 1) for place in range(1000)])
    capture = overlap_of(dict.fromkeys(("compute", "all_gather", "copy"), rows), [(0, 2000)])
    steps = 3 * MAX_LINES
    path = Telemetry(captures=dict.fromkeys(range(0, steps, 30), capture)).write(tmp_path, make_rank([1.0] * steps))
    lines = lines_of(path)
    assert len(lines) == MAX_LINES
    assert max(len(rows) for line in lines for rows in line.get("segments", {}).values()) == MAX_SEGMENTS
    assert path.stat().st_size < 8 << 20
