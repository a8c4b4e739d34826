"""What is recorded of scripts that do not mention the recorder, on one CPU rank."""

import copy
import gc
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.plan.world import World
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.series import Series
from pytest_aorta.result.trace.profiled_steps import Cost
from pytest_aorta.worker import Recorder, finite, overlap, profiling
from pytest_aorta.worker.finite import NotFinite
from pytest_aorta.worker.recorder import Recording
from tests.unit.builders import as_rank_of, each_of, make_plan


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, compiler_is_left_out: None) -> Iterator[Recording]:
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    monkeypatch.setenv("RANK", "1")
    recording = Recording()
    observer = recording.observe(StepRecording(warmup=1, hash_weights=True))
    yield recording
    observer.stop()


@contextmanager
def observing(**settings: Any) -> Iterator[Recording]:
    """Observe the training of the block by a recording of its own."""
    own = Recording()
    observer = own.observe(StepRecording(**settings))
    yield own
    observer.stop()


class Net(nn.Linear):
    pass


def backward(model: nn.Module) -> None:
    """Make the gradients of a loss of the model."""
    model(torch.ones(2, 4)).square().mean().backward()


def train(steps: int, each: Callable[..., object] = lambda *_: None) -> tuple[Net, torch.optim.Optimizer]:
    """Train a model; ``each`` runs before each step of the optimizer, with its number from 1."""
    torch.manual_seed(0)
    model = Net(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(model)
        each(step, model, optimizer)
        optimizer.step()
    return model, optimizer


def only(result: RankResult) -> Series:
    [series] = result.series
    return series


def test_the_step_by_which_a_checkpoint_makes_state_is_none_of_the_training(recording):
    model = Net(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    get_state_dict(model, optimizer)
    for _ in range(3):
        backward(model)
        optimizer.step()
    series = only(recording.result())
    assert (series.num_steps, [*series.loss]) == (3, ["1", "2", "3"])


def test_steps_losses_norms_and_weights_are_counted_from_the_first_step(recording):
    norms: list[float] = []
    _kept = train(11, lambda _, model, __: norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 9.0))))
    series = only(result := recording.result())
    assert (series.name, series.num_steps, series.collectives, series.is_main) == ("SGD of Net", 11, 0, True)
    # The first step has no begin, and one is warm-up.
    assert len(result.step_times_ms) == len(series.step_times_ms) == 9
    assert list(series.loss) == [str(step) for step in range(1, 12)]
    assert [*series.grad_norm.values()] == norms
    assert list(series.weights.hashes) == ["0", "1", "2", "4", "8", "11"]
    assert (series.weights.names, [*series.weights.tensors]) == (["bias", "weight"], ["0", "1", "2", "4", "8", "11"])


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("rotary", torch.zeros(2), persistent=False)


def test_persistent_buffers_are_hashed_also_of_a_model_that_is_dropped(monkeypatch):
    monkeypatch.setenv("AORTA_DEVICE", "cpu")

    def hashes(momentum: float) -> Series:
        with observing(warmup=1, hash_weights=True) as own:
            model = Normed()
            model[1].momentum = momentum
            optimizer = SGD(model[0].parameters(), lr=0.1)
            for _ in range(5):
                model(torch.arange(8.0).view(2, 4)).square().mean().backward()
                optimizer.step()
            del model, optimizer
            gc.collect()
            return only(own.result())

    torch.manual_seed(0)
    one = hashes(0.1)
    torch.manual_seed(0)
    other = hashes(0.2)
    # BatchNorm has no parameter in the optimizer; its statistics belong to the model.
    assert one.buffers.names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert one.weights == other.weights
    assert [*one.buffers.hashes] == [*one.weights.hashes] == ["0", "1", "2", "4", "5"]
    assert one.buffers.hashes != other.buffers.hashes
    assert one.buffers.tensors["5"][0] == other.buffers.tensors["5"][0]


def test_averaged_copies_of_the_model_are_hashed_in_any_order_but_not_one_that_was_dropped(monkeypatch):
    monkeypatch.setenv("AORTA_DEVICE", "cpu")

    def hashes(decay: float) -> Series:
        with observing(warmup=1, hash_weights=True) as own:
            torch.manual_seed(0)
            model = nn.Linear(4, 4, bias=False)
            dropped = copy.deepcopy(model)
            dropped.itself = [dropped]
            del dropped
            averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(one)) for one in (decay, 0.5)]
            teacher = copy.deepcopy(model)
            roots = [nn.Sequential(model), nn.ModuleDict({"a": model})]
            optimizer = SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                roots[0](torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                for one in averages:
                    one.update_parameters(model)
                if teacher is not None:
                    known, teacher = weakref.ref(teacher.weight), None
                    # The recorder keeps no memory that the script frees.
                    assert known() is None
            return only(own.result()).replace(step_times_ms=[])

    one, other = hashes(0.9), hashes(0.99)
    assert (one.model, one.weights.names) == ("ModuleDict + Sequential", ["a.weight"])
    named = ("AveragedModel.module.weight", "AveragedModel.n_averaged")
    assert one.buffers.names == [name + mark for name in named for mark in ("", " (2)")]
    assert one.weights == other.weights
    steps = [step for step in one.buffers.hashes if one.buffers.hashes[step] != other.buffers.hashes[step]]
    assert (steps, len({*one.buffers.tensors["5"][:2]} & {*other.buffers.tensors["5"]})) == (["4", "5"], 1)
    every = finite.modules
    monkeypatch.setattr(finite, "modules", lambda: every()[::-1])
    assert hashes(0.9) == one


def test_clock_that_the_script_stops_does_not_stop_the_recorders(recording, monkeypatch):
    clocks = {getattr(time, name) for name in ("time", "time_ns", "monotonic", "perf_counter", "perf_counter_ns")}

    def stop() -> None:
        for name, module in [*sys.modules.items()]:
            if name == "time" or name.startswith("pytest_aorta."):
                for key, value in [*vars(module).items()]:
                    if callable(value) and value in clocks:
                        monkeypatch.setattr(module, key, lambda: 0)

    _kept = train(9, lambda step, *_: stop() if step == 2 else None)
    monkeypatch.undo()
    assert min(recording.result().step_times_ms) > 0


def test_model_that_is_freed_while_torch_fakes_tensors_is_hashed_after_its_last_step(recording):
    kept = train(5)
    with FakeTensorMode():
        del kept
        gc.collect()
    assert [*only(recording.result()).weights.hashes] == ["0", "1", "2", "4", "5"]


def test_parameters_that_are_added_after_the_last_hashed_step_are_hashed_when_the_model_is_freed(recording):
    def hashes(*, every: bool) -> dict[str, str]:
        torch.manual_seed(0)
        model = nn.Sequential(Net(4, 4), Net(4, 4))
        optimizer = SGD(model[1].parameters(), lr=0.1)
        with observing(hash_weights=True, hash_every_step=every) as own:
            for step in range(1, 8):
                if step == 6:
                    optimizer.add_param_group({"params": model[0].parameters()})
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
            del model, optimizer
            gc.collect()
            return only(own.result()).weights.hashes

    plain, every = hashes(every=False), hashes(every=True)
    assert (plain["7"], plain["4"]) == (every["7"], every["4"])


def test_gradient_that_is_lost_in_the_last_step_is_seen(recording):
    def hashes(change: float) -> dict[str, str]:
        with observing(hash_weights=True) as own:
            train(45, lambda step, model, _: model.weight.grad.mul_(1 + change if step == 45 else 1))
        return only(own.result()).weights.hashes

    plain, changed = hashes(0.0), hashes(-1.0)
    assert [step for step in plain if plain[step] != changed[step]] == ["45"]


@pytest.mark.parametrize("steps", [8, 11])
def test_hash_of_the_last_step_has_what_the_script_does_after_it(recording, steps):
    def hashes(factor: float, *, every: bool) -> dict[str, str]:
        with observing(hash_weights=True, hash_every_step=every) as own:
            kept = train(steps)
            kept[0].weight.data.mul_(factor)
        return only(own.result()).weights.hashes

    plain, every, changed = hashes(2.0, every=False), hashes(2.0, every=True), hashes(1.0, every=False)
    assert plain == {step: every[step] for step in plain}
    assert [step for step in plain if plain[step] != changed[step]] == [str(steps)]


def test_type_that_changes_after_the_last_step_leaves_the_tensors_of_other_steps(recording):
    model, _optimizer = train(11)
    model.bfloat16()
    weights = only(recording.result()).weights
    assert ([*weights.hashes], [*weights.tensors]) == (["0", "1", "2", "4", "8", "11"], ["0", "1", "2", "4", "8"])


def test_parameters_of_modules_that_are_in_no_common_one_have_different_names(recording):
    nets = [Net(4, 4), Net(4, 4)]
    one = SGD([parameter for net in nets for parameter in net.parameters()])
    other = SGD((last := Net(4, 4)).parameters())
    for step in range(1, 6):
        sum(net(torch.ones(2, 4)).sum() for net in (*nets, last)).backward()
        if step == 5:
            nets[0].weight.grad.fill_(math.nan)
        one.step()
        other.step()
    found = recording.result().series
    names = ["bias", "bias (2)", "weight", "weight (2)"]
    assert [series.weights.names for series in found] == [names, ["bias", "weight"]]
    with pytest.raises(NotFinite, match=r"^parameter weight of rank 1 .* first after step 5; "):
        recording.refuse_non_finite()


def test_losses_of_one_backward_pass_are_added_up_unless_they_have_gradients(recording):
    model = Net(4, 2)
    optimizer = SGD(model.parameters(), lr=0.0)
    for gradients in [None] * 4 + [[torch.ones(()), torch.ones(())]]:
        first, second = losses = [*model(torch.ones(4))]
        torch.autograd.backward(losses, grad_tensors=gradients)
        optimizer.step()
    assert only(recording.result()).loss == dict.fromkeys("1234", first.item() + second.item())


def test_modules_that_the_script_has_frozen_name_the_parameters(recording):
    def freeze(step: int, *_: object) -> None:
        if step == 1:
            gc.freeze()
            gc.freeze()

    try:
        kept = train(6, freeze)
        series = only(recording.result())
    finally:
        gc.unfreeze()
        kept = None  # noqa: F841 - is freed before the rest is left out again
        gc.collect()
        gc.freeze()
    assert (series.name, series.weights.names) == ("SGD of Net", ["bias", "weight"])


def test_optimizers_of_each_step_are_not_searched_and_profiled_without_end(recording, monkeypatch):
    searches: list[None] = []
    monkeypatch.setattr(finite, "modules", lambda: searches.append(None) or [])
    for _ in range(40):
        latent = nn.Parameter(torch.ones(2))
        optimizer = SGD([latent], lr=0.1)
        for _ in range(5):
            latent.grad = torch.ones(2)
            optimizer.step()
    assert len(searches) <= finite.MOST_SEARCHED


def test_each_of_many_optimizers_of_one_model_names_its_parameter(recording):
    model = nn.Sequential(*(Net(2, 2) for _ in range(finite.MOST_SEARCHED // 2 + 1)))
    optimizers = [SGD([parameter]) for parameter in model.parameters()]
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    names = [series.weights.names[0] for series in recording.result().series]
    assert names == [name for name, _ in model.named_parameters()]


def test_micro_batches_are_one_loss_and_recomputation_is_none(recording):
    def second(_: int, model: nn.Module, __: torch.optim.Optimizer) -> None:
        # Reentrant checkpointing computes gradients inside of the backward pass.
        hidden = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True)
        loss = hidden.sum() * 0 + 10.0
        loss.backward()
        loss.detach().fill_(99.0)

    _kept = train(3, second)
    torch.manual_seed(0)
    first = Net(4, 4)(torch.ones(2, 4)).square().mean().item()
    assert only(recording.result()).loss["1"] == pytest.approx(first + 10.0)


def test_each_optimizer_has_a_series_and_those_that_take_turns_share_a_step(recording):
    torch.manual_seed(0)
    nets = [Net(4, 4), nn.Linear(4, 4)]
    optimizers = [SGD(nets[0].parameters(), lr=0.1), torch.optim.Adam(nets[1].parameters())]
    for _ in range(6):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
    result = recording.result()
    found = result.series
    assert [series.name for series in found] == ["SGD of Net", "Adam of Linear"]
    assert [len(series.loss) for series in found] == [6, 6]
    assert found[0].loss["1"] != found[1].loss["1"]
    assert all(list(series.weights.hashes) == ["0", "1", "2", "4", "6"] for series in found)
    assert len(result.step_times_ms) == 6 - 2


def test_optimizer_within_an_optimizer_is_no_series(recording):
    class Outer(SGD):
        def step(self, closure: object = None) -> None:
            self.inner.step()

    model = Net(2, 2)
    outer = Outer(model.parameters())
    outer.inner = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        outer.step()
    assert only(recording.result()).optimizer == "Outer"


def test_step_that_calls_the_step_of_its_base_class_is_one_step(recording):
    class Own(SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            if not self.defaults.setdefault("has_raised", False):
                self.defaults["has_raised"] = True
                raise MemoryError

    # Torch calls the hooks in the base class's step too, once the script has made an optimizer of that class.
    (first, own), (second, plain) = ((net := Net(2, 2), kind(net.parameters())) for kind in (Own, SGD))
    for _ in range(5):
        second(first(torch.ones(1, 2))).sum().backward()
        with suppress(MemoryError):
            own.step()
        plain.step()
    assert [(series.num_steps, len(series.loss)) for series in recording.result().series] == [(4, 4), (5, 1)]


@each_of("is_passed_on", {"scaled": False, "scaled and divided": True})
def test_loss_is_what_a_scaler_was_given(recording, is_passed_on):
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    net = Net(4, 4)
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        loss = net(torch.ones(2, 4)).square().mean()
        scaled = scaler.scale(loss)
        # The micro-batches' part of a scaled loss is a loss of its own.
        losses.append((loss * 512.0 if is_passed_on else loss).item())
        (scaled / 2 if is_passed_on else scaled).backward()
        scaler.step(optimizer)
        scaler.update()
    found = only(recording.result()).loss
    assert list(found.values()) == losses


def test_iteration_that_a_scaler_skips_is_no_loss_of_the_next_step(recording):
    torch.manual_seed(0)
    model = Net(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    for number in range(6):
        (model(torch.ones(1, 2)).sum() * 0 + number).backward()
        model.weight.grad.fill_(math.inf if number == 2 else 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number != 2:
            optimizer.step()
        optimizer.zero_grad()
    series = only(recording.result())
    assert [*series.loss.values()] == [0, 1, 3, 4, 5]
    assert all(map(math.isfinite, series.grad_norm.values()))
    recording.refuse_non_finite()


@pytest.mark.parametrize("is_before", [True, False])
def test_losses_that_the_script_records_belong_to_the_timed_steps(recording, is_before):
    optimizer = SGD([nn.Parameter(torch.zeros(2))])
    for number in range(1, 6):
        if is_before:
            Recorder(recording).loss(number)
        optimizer.step()
        if not is_before:
            Recorder(recording).loss(number)
    result = recording.result()
    assert (len(result.step_times_ms), result.loss) == (3, [3.0, 4.0, 5.0])


def _at_9(step: int, model: Net, _optimizer: object) -> object:
    return step == 9 and model.bias.grad.fill_(math.nan)


@each_of(
    "planted, found, every",
    {
        # A slow machine looks at the parameters more often.
        "loss": (
            _at_9,
            "(loss of rank 1 is nan first in step 10 of 12|parameter bias of rank 1 .* after step 9); ",
            False,
        ),
        "every step": (_at_9, "parameter bias of rank 1 is NaN or infinite first after step 9; ", True),
        "last step": (
            lambda step, model, _: step == 12 and model.bias.grad.fill_(math.nan),
            "parameter bias of rank 1 is NaN or infinite first after step 12; ",
            False,
        ),
        "norm": (
            lambda step, model, _: (
                nn.utils.clip_grad_norm_([model.bias], 1.0)
                and step == 5
                and (model.bias.grad.fill_(math.inf), nn.utils.clip_grad_norm_([model.bias], 1.0))
            ),
            "gradient norm of rank 1 is inf first in step 5 of 12; ",
            True,
        ),
    },
)
def test_value_that_is_not_finite_names_the_step(recording, planted, found, every):
    recording.observe(StepRecording(hash_every_step=every))
    _kept = train(12, planted)
    recording.result()
    with pytest.raises(NotFinite, match=f"^{found}"):
        recording.refuse_non_finite()


def test_script_may_record_its_steps_itself_unless_both_were_asked_for(recording):
    _kept = train(2)
    with pytest.raises(RuntimeError, match="use one of the two"), Recorder(recording).step():
        pass
    recording.observe(StepRecording(), is_asked=False)
    with Recorder(recording).step():
        pass
    assert (recording.result().series, len(recording.result().step_times_ms)) == ([], 1)


@each_of(
    "script, cause",
    {
        "fewer than the warm-up": (
            lambda: train(2),
            "its optimizer made 2 steps, and the first 2 are not timed, .* run at least 3 steps",
        ),
        "no step": (lambda: SGD([torch.zeros(1)]), "made an optimizer, and no optimizer stepped"),
    },
)
def test_cause_of_no_step_is_named(recording, script, cause):
    _kept = script()
    with pytest.raises(RuntimeError, match=f"^the script recorded no step: .*{cause}"):
        recording.result()


def test_simulated_script_that_ends_early_says_why_it_may(tmp_path, monkeypatch):
    as_rank_of(make_plan(tmp_path, world=World(8, "cpu", simulated=(0,))), monkeypatch)
    with observing(warmup=3) as own:
        _kept = train(4)
        with pytest.raises(RuntimeError, match=r"made 4 steps, fewer than 5: .*simulated ranks exchange no values"):
            own.result()


def test_script_without_an_optimizer_is_measured_as_a_whole(recording):
    result = recording.result()
    assert (len(result.step_times_ms), len(result.memory_bytes)) == (1, 1)
    assert "no optimizer" in result.costs.problem


def test_steps_are_profiled_after_twenty_timed_ones_and_timing_goes_on(recording):
    recording.observe(StepRecording(warmup=8, hash_weights=True))
    _kept = train(40)
    result = recording.result()
    # One step begins, three are profiled, and the one after them is not timed.
    assert (len(result.profile.steps), len(result.step_times_ms)) == (3, 31 - 1 - 3 - 1)
    # Step 32 is among those, and no weights are hashed within them.
    assert list(only(result).weights.hashes) == ["0", "1", "2", "4", "8", "16", "33", "40"]
    assert result.metrics["exposed_comm_ms"] == 0.0
    assert "aten::addmm" in result.profile.kernels
    assert len(only(result).loss) == 40


@pytest.mark.parametrize(("steps", "missing"), [(12, 14), (24, 2)])
def test_script_that_is_too_short_for_profiled_steps_says_how_many_more_it_needs(recording, steps, missing):
    kept = train(steps)
    result = recording.result()
    assert (result.profile.steps, len(result.step_times_ms)) == ([], min(steps - 2, 20))
    assert result.profile.problem.endswith(f"run {missing} more steps")
    del kept
    recording.steps.stop()
    with observing(warmup=1) as again:
        _longer = train(steps + missing)
        assert len(again.result().profile.steps) == 3


@pytest.mark.parametrize(
    ("order", "counted", "profiled"),
    [
        ("ab" * 26, {"tanh": 1, "sin": 1}, 0),
        ("abbb" * 26, {"tanh": 1, "sin": 3}, 3),
        ("abbb" * 10 + "a" * 25, {"tanh": 1, "sin": 3}, 3),
        ("a" * 9 + "b" * 9, {"tanh": 1, "sin": 1}, 0),
        # The first optimizer makes no further step after its profile or its count has begun.
        ("a" * 24 + "b" * 110, {"tanh": 1, "sin": 1}, 3),
        ("a" + "b" * 110, {"tanh": 0, "sin": 1}, 3),
    ],
)
def test_costs_are_those_of_steps_of_all_optimizers(recording, order, counted, profiled):
    recording.observe(StepRecording(warmup=2, hash_weights=True))
    nets = {"a": (Net(4, 4), torch.tanh), "b": (Net(4, 4), torch.sin)}
    optimizers = {name: SGD(net.parameters()) for name, (net, _) in nets.items()}
    for name in order:
        net, function = nets[name]
        function(net(torch.ones(2, 4))).sum().backward()
        optimizers[name].step()
    result = recording.result()
    assert {name: result.costs.operators.get(f"aten::{name}", 0) for name in counted} == counted
    assert len(result.profile.steps) == profiled


@pytest.mark.parametrize(("every", "windows"), [(1, 1), (2, 1), (5, 1), (1, 3), (2, 3), (500, 3)])
def test_no_scope_is_entered_under_one_profiler_and_left_under_another(recording, monkeypatch, every, windows):
    """Torch would end by SIGSEGV now and then; each step of an optimizer, and of a loop, is such a scope."""
    if windows > 1:  # as on a device
        for name, value in {
            "on_accelerator": True,
            "cycles_per_ms": 1.0,
            "spin": None,
            "_new_mark": torch.ones(1),
        }.items():
            monkeypatch.setattr(overlap, name, lambda *_, value=value: value)
        monkeypatch.setattr(profiling, "profiler_of", lambda *_, **__: profile(use_cpu=True, use_kineto=True))
    begun: list[profile] = []
    enter = profile.__enter__
    monkeypatch.setattr(profile, "__enter__", lambda self: begun.append(self) or enter(self))
    recording.observe(StepRecording(warmup=2))
    nets = [Net(4, 4), Net(4, 4)]
    optimizers = [SGD(net.parameters()) for net in nets]
    for iteration in range(120):
        number = len(begun)
        was_profiled = torch.autograd.profiler._is_profiler_enabled
        for net, optimizer in list(zip(nets, optimizers, strict=True))[: 1 + (iteration % every == 0)]:
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        is_profiled = torch.autograd.profiler._is_profiler_enabled
        assert not (was_profiled and is_profiled and len(begun) > number), iteration
    assert len(begun) >= 1 + windows
    recording.result()


@each_of(
    "wait, costs, overlap",
    {
        "before the counted step": (1, "in its warm-up steps, and torch has one profiler per thread", ""),
        "in the counted step": (2, "in its warm-up steps, which ended the count of costs", ""),
        "in a profiled step": (24, "", "the script runs torch.profiler itself, which ended the profile of its steps"),
        "after them": (40, "", ""),
    },
)
def test_profiler_of_the_script_ends_that_of_the_recorder(recording, wait, costs, overlap):
    recording.observe(StepRecording(warmup=2))
    schedule = torch.profiler.schedule(wait=wait, warmup=1, active=2, repeat=1)
    # Without acc_events, torch 2.11 warns, and a warning is an error here.
    with torch.profiler.profile(schedule=schedule, acc_events=True) as own:
        _kept = train(50, lambda *_: own.step())
    result = recording.result()
    assert result.costs.problem.endswith(costs)
    assert bool(result.costs.problem) is bool(costs)
    assert result.profile.problem == overlap
    assert len(own.events()) > 0


def test_steps_within_a_backward_pass_end_with_it(recording):
    recording.observe(StepRecording(warmup=2))
    net = nn.Sequential(Net(4, 4), Net(4, 4))
    optimizers = {parameter: SGD([parameter]) for parameter in net.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(30):
        # The last stage of a pipeline passes its loss in a tuple.
        torch.autograd.backward((net(torch.ones(2, 4)).tanh().sum(),))
    result = recording.result()
    assert len(result.series) == 4
    assert [len(series.loss) for series in result.series] == [30, 0, 0, 0]
    assert (result.profile.problem, len(result.profile.steps)) == ("", 3)
    assert (result.costs.problem, result.costs.operators["aten::tanh"]) == ("", 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of inductor's imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of tracing a backward pass
@pytest.mark.parametrize("has_backward", [False, True])
def test_compiled_step_is_not_compiled_anew_in_each_step(recording, has_backward):
    numbers: list[int] = []
    counter = CompileCounter()
    recording.observe(StepRecording(hash_weights=True, hash_every_step=has_backward))
    model = Net(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)

    def compute() -> None:
        backward(model)

    def step() -> None:
        if has_backward:
            compute()
        optimizer.step()

    compiled = torch.compile(step, backend=counter)
    for _ in range(12):
        if not has_backward:
            compute()
        compiled()
        optimizer.zero_grad()
        numbers.append(counter.frame_count)
    assert numbers[2] == numbers[-1]
    assert only(recording.result()).num_steps == 12


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loss_without_data_is_none_of_the_steps(recording, device):
    def attempt(step: int, *_: object) -> None:
        with FakeTensorMode() if device == "cpu" else nullcontext():
            torch.zeros(2, device=device, requires_grad=True).square().mean().backward()

    _kept = train(6, attempt)
    assert list(only(recording.result()).loss) == ["1", "2", "3", "4", "5", "6"]


def test_what_the_recorder_computes_is_no_cost_of_a_step(recording):
    def counts(recording: Recording) -> dict[str, int]:
        second = SGD((kept := Net(2, 2)).parameters())
        kept = train(9, lambda *_: second.step()), kept
        return recording.result().costs.operators

    recording.observe(StepRecording(warmup=2, hash_weights=True))
    recording.steps.stop()
    with observing(warmup=2, hash_weights=False) as own:
        plain = counts(own)
    recording.steps.start()
    assert counts(recording) == plain
    assert "aten::item" not in plain


def test_trace_for_which_there_is_no_room_says_what_to_do():
    with profile(use_cpu=True, use_kineto=True) as profiler:
        torch.ones(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="could not write its trace; make room there"):
            profiling.Exported(profiler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_places_name_a_module_that_was_wrapped_after_the_first_step():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    with observing(warmup=2) as own:
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model = nn.Sequential(nn.ReLU(), model) if len(model) == 1 else model
        [place] = own.result().costs.places[Cost.OPERATORS]["aten::addmm"]
    assert place.startswith("module 1.0 at ")
