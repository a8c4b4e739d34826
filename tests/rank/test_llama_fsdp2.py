"""FSDP2's collectives and clipped gradients in a step of llama_fsdp2, on one of two ranks; the other is simulated."""

import re

import pytest
import torch
from aorta_workloads.common.gradients import total_norm, whole_norm
from aorta_workloads.distributed import fsdp2
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload
from aorta_workloads.models.common.moe import Dispatched, MoeFeedForward, TokenDispatcher
from torch.distributed.tensor.debug import CommDebugMode

from tests.unit.builders import each_of

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
def make_workload(set_up):
    """Return a function that returns the workload of rank 0 after setup()."""
    return lambda world_size=2, **changes: set_up(LlamaFsdp2Workload, world_size, **MODEL | changes)


def events_of_a_step(workload):
    """Train one step and return its events as text.

    ``g0``, ``0`` and ``r0`` are the gather of block 0, the end of its forward, and the reduction of its gradients.
    ``e`` is the embedding, and ``o`` is the norm with the output.
    """
    events = []
    for name, unit in UNITS.items():
        module = workload.model.get_submodule(name)
        module.set_custom_all_gather(Gather(events, f"g{unit}"))
        module.set_custom_reduce_scatter(Reduction(events, f"r{unit}"))
        module.register_forward_hook(lambda *_, unit=unit: events.append(unit))
    workload.train_step(next(workload.batches))
    return " ".join(events)


FORWARD, BACKWARD = "ge e g0 0 g1 1 g2 2 go o", "g2 ro g1 r2 g0 r1 ge r0 re"


TWO = {"gradient_accumulation": 2}
SCHEDULES = {
    # In backward, FSDP2 gathers the next unit before it reduces the gradients of this one.
    "plain": ({}, [FORWARD, BACKWARD]),
    "forward prefetch": ({"forward_prefetch": 2}, ["ge e g0 g1 g2 0 1 2 go o", BACKWARD]),
    "backward prefetch": ({"backward_prefetch": 2}, [FORWARD, "g2 ro g1 g0 r2 r1 ge r0 re"]),
    "not resharded": ({"reshard_after_forward": False}, [FORWARD, "ro r2 r1 r0 re"]),
    "micro-batches": (TWO, [FORWARD, "g2 g1 g0 ge", FORWARD, BACKWARD]),
    "reduced micro-batches": (TWO | {"reduce_every_micro_batch": True}, [FORWARD, BACKWARD] * 2),
}


@each_of("changes, passes", SCHEDULES)
def test_units_are_gathered_and_reduced_when_the_keys_say(make_workload, changes, passes):
    assert events_of_a_step(make_workload(**changes)) == " ".join(passes)


def test_gradients_are_clipped_to_the_largest_norm_and_the_norm_before_is_returned(make_workload):
    workload = make_workload(world_size=1, max_grad_norm=0.01)
    _, before = workload.train_step(next(workload.batches))
    assert float(whole_norm(before)) > 0.1
    assert float(whole_norm(total_norm(workload.model))) == pytest.approx(0.01, rel=1e-3)


def trace(gradient=None):
    with torch.profiler.record_function("exchange"):
        return gradient


class TracedDispatcher(TokenDispatcher):
    """Replaces the exchange of tokens, which the simulated ranks can't answer; the trace has it, in backward too."""

    def dispatch(self, rows, counts):
        trace()
        # Two ranks share the experts, and the first expert of this rank gets all rows.
        return Dispatched(rows, torch.tensor([len(rows)] + [0] * (len(counts) // 2 - 1)))

    def combine(self, out, dispatched):
        out.register_hook(trace)
        return out


def gathers_between_exchanges(workload):
    """Train one step; return what is gathered before each exchange: ``1`` and ``e1`` are block 1 and its experts."""
    for module in workload.model.modules():
        if isinstance(module, MoeFeedForward):
            module.dispatcher = TracedDispatcher()
    workload.train_step(next(workload.batches))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        workload.train_step(next(workload.batches))
    gathered = [set()]
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.name == "exchange":
            gathered.append(set())
        elif found := re.match(r"FSDP::all_gather \(layers.(\d)(.*)", event.name):
            # The ranks that share experts are two, and four share everything else.
            is_of_experts = "experts" in found[2] or "pg=2" in found[2]
            gathered[-1].add(f"e{found[1]}" if is_of_experts else found[1])
    return gathered


PREFETCHED = {
    "plain": (0, [{"0", "e0"}, {"1", "e1"}, {"2", "e2"}]),
    # While the host waits for the counts of tokens in an exchange, it starts no gather.
    "forward prefetch": (1, [{"0", "e0", "1", "e1"}, {"2", "e2"}, set()]),
}


@each_of("has_parameter_meshes", {"one unit": True, "experts apart, as torch 2.11 needs": False})
@each_of("prefetch, forward", PREFETCHED)
def test_experts_are_gathered_with_their_block_and_ahead_in_backward(
    make_workload, monkeypatch, has_parameter_meshes, prefetch, forward
):
    if has_parameter_meshes and not fsdp2.HAS_PARAMETER_MESHES:
        pytest.skip("a unit of this torch has one mesh")
    monkeypatch.setattr(fsdp2, "HAS_PARAMETER_MESHES", has_parameter_meshes)
    workload = make_workload(world_size=4, num_experts=4, expert_parallel_degree=2, forward_prefetch=prefetch)

    backward = [{"2", "e2", "1", "e1"}, {"0", "e0"}, set(), set()]
    assert gathers_between_exchanges(workload) == [*forward, *backward]


@pytest.mark.parametrize(
    ("degrees", "all_reduces"),
    [
        ({}, 1),
        ({"data_parallel_replicate_degree": 2}, 1),
        ({"num_experts": 4, "expert_parallel_degree": 2}, 2),
        ({"num_experts": 4, "expert_parallel_degree": 2, "tensor_parallel_degree": 2}, 2),
    ],
    ids=str,
)
def test_the_norm_of_each_mesh_is_reduced_at_once(make_workload, caplog, degrees, all_reduces):
    workload = make_workload(world_size=8, **degrees)
    for parameter in workload.model.parameters():
        parameter.grad = torch.ones_like(parameter)

    with CommDebugMode() as communication:
        whole_norm(workload.total_norm())

    assert communication.get_total_counts() == all_reduces
    assert "sequential all_reduce" not in caplog.text
