"""FSDP2's collectives and clipped gradients in a step of llama_fsdp2, on one of two ranks; the other is simulated."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from aorta_workloads.common.gradients import total_norm, whole_norm
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload

from pytest_aorta.worker import RankEnv
from tests.rank.ranks import fake_group
from tests.rank.settings import default_config

MODEL = {"n_layers": 3, "seq_len": 8, "batch_size": 1, "steps": 1, "warmup": 0, "max_grad_norm": None}
# The last module of each unit, in the order of the model.
UNITS = {"tok_embeddings": "e", "layers.0": "0", "layers.1": "1", "layers.2": "2", "output": "o"}


class Collective:
    """A replacement for a collective of one unit, in a world whose ranks hold equal data; each call is logged."""

    def __init__(self, events, event):
        self.events, self.event = events, event

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Collective):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.events.append(self.event)
        output_tensor.view(2, -1).copy_(input_tensor.clone())


class Reduction(Collective):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.events.append(self.event)
        output_tensor.copy_(input_tensor.view(2, -1)[0])


@pytest.fixture
def make_workload(monkeypatch):
    """Return a function that returns the workload of rank 0 after setup()."""

    monkeypatch.setattr(RankEnv, "join", lambda *_, **__: groups.enter_context(fake_group(2)) or torch.device("cpu"))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))

    def make(**changes):
        workload = LlamaFsdp2Workload(default_config("llama_fsdp2", **MODEL | changes))
        workload.setup()
        return workload

    with ExitStack() as groups:
        yield make


def events_of_a_step(workload):
    """Train one step and return its events as text.

    ``g0``, ``0`` and ``r0`` are the gather of block 0, the end of its forward, and the reduction of its gradients.
    ``e`` is the embedding, and ``o`` is the norm with the output.
    """
    events = []
    for name, unit in UNITS.items():
        module = workload._model.get_submodule(name)
        module.set_custom_all_gather(Gather(events, f"g{unit}"))
        module.set_custom_reduce_scatter(Reduction(events, f"r{unit}"))
        module.register_forward_hook(lambda *_, unit=unit: events.append(unit))
    workload._train_step(0, workload._batches[0])
    return " ".join(events)


FORWARD, BACKWARD = "ge e g0 0 g1 1 g2 2 go o", "g2 ro g1 r2 g0 r1 ge r0 re"


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        # In backward, FSDP2 gathers the next unit before it reduces the gradients of this one.
        ({}, FORWARD, BACKWARD),
        ({"forward_prefetch": 2}, "ge e g0 g1 g2 0 1 2 go o", BACKWARD),
        ({"backward_prefetch": 2}, FORWARD, "g2 ro g1 g0 r2 r1 ge r0 re"),
        ({"reshard_after_forward": False}, FORWARD, "ro r2 r1 r0 re"),
        ({"unsharded_blocks": 1}, FORWARD, "ro g1 r2 g0 r1 ge r0 re"),
    ],
    ids=["plain", "forward prefetch", "backward prefetch", "not resharded", "last block not resharded"],
)
def test_units_are_gathered_and_reduced_when_the_keys_say(make_workload, changes, forward, backward):
    assert events_of_a_step(make_workload(**changes)) == f"{forward} {backward}"


@pytest.mark.parametrize(("every", "first"), [(False, "g2 g1 g0 ge"), (True, BACKWARD)])
def test_gradients_of_earlier_micro_batches_are_reduced_only_if_asked_for(make_workload, every, first):
    events = events_of_a_step(make_workload(gradient_accumulation=2, reduce_every_micro_batch=every))
    assert events == f"{FORWARD} {first} {FORWARD} {BACKWARD}"


def test_gradients_are_clipped_to_the_largest_norm_and_the_norm_before_is_returned(make_workload):
    workload = make_workload(max_grad_norm=0.01)
    _, before = workload._train_step(0, workload._batches[0])
    assert float(whole_norm(before)) > 0.1
    assert float(whole_norm(total_norm(workload._model))) == pytest.approx(0.01, rel=1e-3)


def test_each_step_trains_with_the_rate_of_the_schedule(make_workload):
    workload = make_workload(lr=0.5, lr_schedule={"warmup": 4})
    rates = []
    for _ in range(2):
        workload._train_step(0, workload._batches[0])
        rates += {group["lr"] for group in workload._optimizer.param_groups}
    assert rates == [0.125, 0.25]
