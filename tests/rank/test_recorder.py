"""Results of a script that uses the recorder's three lines; on CPU."""

import re

import pytest
import torch
from torch import nn

from pytest_aorta.worker import Recorder, hash_parameters
from pytest_aorta.worker.finite import NotFinite, refuse_non_finite
from pytest_aorta.worker.recorder import Recording
from tests.rank.ranks import own_group, run_rank_alone
from tests.unit.builders import each_of, write_plan


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    return Recording()


@pytest.fixture
def recorder(recording: Recording) -> Recorder:
    return Recorder(recording)


def record(recorder: Recorder, losses: list[float]) -> None:
    for loss in losses:
        with recorder.step(tokens=10):
            pass
        recorder.loss(loss)


def test_first_step_starts_the_recorder(recorder, recording):
    record(recorder, [3.0, 2.0])
    result = recording.result()
    assert (len(result.step_times_ms), result.loss, result.environment["device"]) == (2, [3.0, 2.0], "cpu")
    assert result.metrics["tokens_per_s"] == pytest.approx(20 / (sum(result.step_times_ms) / 1000))


def test_warm_up_has_neither_times_nor_losses_nor_tokens(recorder, recording):
    recorder.start(warmup=2)
    record(recorder, [5.0, 4.0, 3.0])
    result = recording.result()
    assert (result.loss, len(result.step_times_ms)) == ([3.0], 1)
    assert result.metrics["tokens_per_s"] == pytest.approx(10 / (result.step_times_ms[0] / 1000))


def test_without_tokens_there_is_no_throughput(recorder, recording):
    with recorder.step():
        pass
    assert recording.result().metrics == {}


def test_own_throughput_is_not_replaced(recorder, recording):
    recorder.metric("tokens_per_s", 7.0)
    record(recorder, [1.0])
    assert recording.result().metrics == {"tokens_per_s": 7.0}


def test_loss_may_be_a_tensor_that_the_script_writes_over(recorder, recording):
    loss = torch.tensor(2.0, requires_grad=True)
    with recorder.step():
        pass
    recorder.loss(loss)
    recorder.grad_norm(loss.detach() * 2)
    with torch.no_grad():
        loss.fill_(9.0)
    assert (recording.result().loss, recording.result().grad_norm) == ([2.0], [4.0])


def test_weights_are_hashed_after_the_last_step(recorder, recording):
    model = nn.Linear(3, 3)
    record(recorder, [1.0, 1.0])
    for _ in range(2):  # the same weights may be recorded again
        recorder.weights(model)
    assert recording.result().weight_hashes == {"2": hash_parameters(model.named_parameters()).hex}


def test_weights_under_ddp_have_the_hash_of_the_model(recorder, recording, tmp_path):
    model = nn.Linear(2, 3)
    with own_group(tmp_path):
        record(recorder, [1.0])
        wrapped = nn.parallel.DistributedDataParallel(model)
        # The compiler holds the module that it compiles as _orig_mod.
        compiled = nn.Module()
        compiled._orig_mod = wrapped
        recorder.weights(compiled)
        recorder.weights(wrapped)
        recorder.weights(model)
    assert [name for name, _ in recording.named_parameters()] == ["weight", "bias"]


@each_of("given", {"number": 7, "state": {"w": torch.zeros(1)}, "list": [nn.Linear(2, 2)]})
def test_weights_of_something_else_than_a_module_are_refused(recorder, given):
    expected = rf"recorder.weights: got a {type(given).__name__}, allowed is a torch.nn.Module, .*ModuleList"
    with pytest.raises(TypeError, match=expected):
        recorder.weights(given)


@pytest.mark.parametrize("kind", ["loss", "grad_norm"])
def test_tensor_of_several_elements_is_refused_where_it_is_recorded(recorder, kind):
    with recorder.step():
        pass
    expected = rf"recorder.{kind}: got a tensor of shape \[4\], allowed is a number or a tensor with one element"
    with pytest.raises(ValueError, match=expected):
        getattr(recorder, kind)(torch.ones(4))


def test_second_model_after_the_same_step_is_refused(recorder):
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    recorder.start(warmup=1)
    for _ in range(2):
        record(recorder, [1.0])
        # During the warm-up, each step's weights replace those before.
        recorder.weights(one)
        nn.init.zeros_(one.weight)
    with pytest.raises(RuntimeError, match=r"two hashes of weights were recorded after measured step 1: .*ModuleList"):
        recorder.weights(other)


def test_loss_of_a_step_that_did_not_end_is_not_taken_for_another_steps(recorder, recording):
    def last_step() -> None:
        with recorder.step():
            recorder.loss(1.0)
            raise SystemExit

    record(recorder, [3.0, 2.0])
    with pytest.raises(SystemExit):
        last_step()
    result = recording.result()
    # Reading the result refuses a loss without a step.
    assert (len(result.step_times_ms), result.loss) == (2, [3.0, 2.0, 1.0])


@pytest.mark.parametrize("warmup", [0, 1])
def test_step_inside_of_a_step_is_refused_since_its_time_would_count_twice(recorder, recording, warmup):
    recorder.start(warmup=warmup)
    with recorder.step(), pytest.raises(RuntimeError, match="inside of another step"), recorder.step():
        pass
    record(recorder, [1.0])
    assert len(recording.result().step_times_ms) == 2 - warmup


def test_second_start_is_refused(recorder):
    record(recorder, [1.0])
    with pytest.raises(RuntimeError, match="called twice, or after the first"):
        recorder.start()


def test_script_without_a_measured_step_fails_with_what_to_do(recorder, recording):
    recorder.start(warmup=5)
    record(recorder, [1.0])
    with pytest.raises(RuntimeError, match="run more steps than the warm-up has"):
        recording.result()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("method", "quantity"), [("loss", "loss"), ("grad_norm", "gradient norm")])
def test_value_that_is_not_finite_names_quantity_rank_and_first_step(
    recorder, recording, monkeypatch, method, quantity, value
):
    monkeypatch.setenv("RANK", "3")
    for recorded in (2.0, value, value, 1.0):
        with recorder.step():
            pass
        getattr(recorder, method)(torch.tensor(recorded))
    expected = f"{quantity} of rank 3 is {value} first in measured step 2 of 4; "
    with pytest.raises(NotFinite, match=f"^{re.escape(expected)}"):
        refuse_non_finite(recording.result())
    with pytest.raises(NotFinite, match=f"^{re.escape(expected)}"):
        recorder.weights(nn.Linear(2, 2))


def test_loss_that_only_some_steps_have_names_the_recorded_value(recorder, recording, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    record(recorder, [1.0, float("nan")])
    with recorder.step():
        pass
    with pytest.raises(NotFinite, match="first in recorded value 2 of 2; "):
        refuse_non_finite(recording.result())


def test_metric_that_is_not_finite_is_named(recorder, recording, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    recorder.metric("samples_per_s", float("inf"))
    record(recorder, [1.0])
    with pytest.raises(NotFinite, match=r"^metric samples_per_s of rank 1 is inf; "):
        refuse_non_finite(recording.result())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameter_that_is_not_finite_names_the_rank_and_the_step(recorder, monkeypatch, dtype):
    monkeypatch.setenv("RANK", "2")
    model = nn.Linear(3, 2, dtype=dtype)
    record(recorder, [2.0, 1.0])
    recorder.weights(model)
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    expected = "parameter weight of rank 2 has 1 of 6 elements that are NaN or infinite after measured step 2; "
    with pytest.raises(NotFinite, match=f"^{re.escape(expected)}"):
        recorder.weights(model)


DIVERGING = """
import torch
from pytest_aorta.worker import recorder

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 13):
    model(torch.ones(1, 4)).sum().backward()
    if step == 9:
        model[1].bias.grad.fill_(float("nan"))
    with recorder.step():
        optimizer.step()
    optimizer.zero_grad()
"""


def test_weights_that_become_nan_are_refused_although_the_script_records_none(tmp_path):
    (tmp_path / "train.py").write_text(DIVERGING)
    (folder := tmp_path / "ranks" / "1").mkdir(parents=True)
    write_plan(tmp_path)
    done = run_rank_alone(tmp_path, folder, RANK="1", WORLD_SIZE="2", AORTA_DEVICE="cpu", COMES_TO_ITS_END="yes")
    assert "NotFinite: parameter 1.bias of rank 1 is NaN or infinite first after measured step 9; " in done.stderr
    assert not (folder / "result.json").exists()


def test_hashes_of_single_parameters_are_recorded_of_the_first_steps(recorder, recording):
    model = nn.Linear(3, 2)
    for _ in range(6):
        with recorder.step():
            model.weight.data.add_(1)
        recorder.weights(model)
    found = recording.result().tensor_hashes["weights"]
    assert (found.names, found.shapes, [*found.steps]) == (["bias", "weight"], [[2], [2, 3]], ["1", "2", "3", "4"])
    assert [len({row[place] for row in found.steps.values()}) for place in (0, 1)] == [1, 4]
