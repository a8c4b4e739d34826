"""Results of a script that uses the recorder's three lines, and of an adapter's rank; on CPU."""

from __future__ import annotations

import pytest
import torch

from pytest_aorta.plan.workload.adapter import AdapterError
from pytest_aorta.worker import Recorder, hash_parameters
from pytest_aorta.worker.from_logs import adapted_result

PATTERN = r"step (?P<step>\d+): (?P<step_time_ms>[\d.]+) ms, loss (?P<loss>\S+)"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    return Recorder()


def record(recorder: Recorder, losses: list[float]) -> None:
    for loss in losses:
        with recorder.step(tokens=10):
            pass
        recorder.loss(loss)


def test_first_step_starts_the_recorder(recorder: Recorder) -> None:
    record(recorder, [3.0, 2.0])
    result = recorder.result()
    assert (len(result.step_times_ms), result.loss, result.environment["device"]) == (2, [3.0, 2.0], "cpu")
    assert result.metrics["tokens_per_s"] == pytest.approx(20 / (sum(result.step_times_ms) / 1000))


def test_warm_up_has_neither_times_nor_losses_nor_tokens(recorder: Recorder) -> None:
    recorder.start(warmup=2)
    record(recorder, [5.0, 4.0, 3.0])
    result = recorder.result()
    assert (result.loss, len(result.step_times_ms)) == ([3.0], 1)
    assert result.metrics["tokens_per_s"] == pytest.approx(10 / (result.step_times_ms[0] / 1000))


def test_without_tokens_there_is_no_throughput(recorder: Recorder) -> None:
    with recorder.step():
        pass
    assert recorder.result().metrics == {}


def test_own_throughput_is_not_replaced(recorder: Recorder) -> None:
    recorder.metric("tokens_per_s", 7.0)
    record(recorder, [1.0])
    assert recorder.result().metrics == {"tokens_per_s": 7.0}


def test_loss_may_be_a_tensor_that_the_script_writes_over(recorder: Recorder) -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    with recorder.step():
        pass
    recorder.loss(loss)
    recorder.grad_norm(loss.detach() * 2)
    with torch.no_grad():
        loss.fill_(9.0)
    assert (recorder.result().loss, recorder.result().grad_norm) == ([2.0], [4.0])


def test_weights_are_hashed_after_the_last_step(recorder: Recorder) -> None:
    model = torch.nn.Linear(3, 3)
    record(recorder, [1.0, 1.0])
    recorder.weights(model)
    assert recorder.result().weight_hashes == {"2": hash_parameters(model.named_parameters()).hex}


def test_second_start_is_refused(recorder: Recorder) -> None:
    record(recorder, [1.0])
    with pytest.raises(RuntimeError, match="called twice, or after the first"):
        recorder.start()


def test_script_without_a_measured_step_fails_with_what_to_do(recorder: Recorder) -> None:
    recorder.start(warmup=5)
    record(recorder, [1.0])
    with pytest.raises(RuntimeError, match="run more steps than the warm-up has"):
        recorder.result()


def adapter(**changes: object) -> dict[str, object]:
    return {"kind": "log", "pattern": PATTERN, "scalars": []} | changes


def test_log_of_a_rank_becomes_its_result(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "output.log").write_text("step 1: 9 ms, loss 3\nstep 2: 1.5 ms, loss 2\n")
    result = adapted_result([adapter(), adapter(warmup=1)], tmp_path)
    assert result is not None
    assert (result.step_times_ms, result.loss, result.weight_hashes, result.wait_ms) == ([1.5], [2.0], {}, [])
    assert result.environment["torch"] == torch.__version__


def test_rank_that_does_not_log_has_no_result(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert adapted_result([adapter(ranks="first")] * 2, tmp_path) is None


def test_rank_that_should_have_logged_says_what_it_logged_instead(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "output.log").write_text("nothing of it\n")
    with pytest.raises(AdapterError, match=r"which ends:\n  \| nothing of it"):
        adapted_result([adapter(ranks="first")], tmp_path)
