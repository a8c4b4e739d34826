"""Every fault planted in the fsdp workload's data is found, counted, located and named, without ranks."""

from dataclasses import asdict, dataclass

import pytest
import torch
from aorta_workloads.common.streams import Prefetcher, Stream, Work
from aorta_workloads.fsdp import faults as planted
from aorta_workloads.fsdp import schedule
from aorta_workloads.fsdp.buffers import Buffers
from aorta_workloads.fsdp.faults import FaultyStep
from aorta_workloads.fsdp.oracle import CodeTable
from aorta_workloads.fsdp.settings import GATHER_KINDS, FaultSpec, Settings
from aorta_workloads.fsdp.verification import MAX_DETAILS, Verification
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.settings import default_config
from tests.unit.builders import each_of

CPU = torch.device("cpu")
WARMUP, CHECKED, LAYERS, WORLD_SIZE, SHARD_SIZE, INPUT_SIZE = 2, 3, 3, 4, 301, 77
PHASES = ("forward", "backward")
CAUSES = {
    "stale_gather": "stale: from 1 iteration before",
    "zeroed_gather": "zeroed: no data arrived",
    "partial_gather": "only part, 151 of 301: stale: from 1 iteration before",
    "permuted_gather": "only part, 2 of 301: permuted: the right values at wrong positions",
    "stale_h2d": "stale: from 1 iteration before",
    "stale_gradient": "stale: from 1 iteration before",
}
SIZES = {"layers": LAYERS, "fsdp_shard_size": SHARD_SIZE, "h2d_tensor_size": INPUT_SIZE}
SIZES |= {"warmup": WARMUP, "verify": CHECKED, "gemm_size": 1, "comm_stream": False, "h2d_prefetch": False}
bounded = settings(max_examples=20, deadline=None, database=None)
faults = st.builds(
    FaultSpec,
    iteration=st.integers(0, CHECKED - 1),
    layer=st.integers(0, LAYERS - 1),
    phase=st.sampled_from(PHASES),
    rank=st.integers(0, WORLD_SIZE - 1),
    source_rank=st.integers(0, WORLD_SIZE - 1),
)


class OneRank:
    """The steps of one rank of a world of ``WORLD_SIZE``; every rank's part is computed in this process."""

    def __init__(self, rank, spec, dtype="bfloat16", **keys):
        config = default_config("fsdp", **SIZES | {"dtype": dtype, "fault": asdict(spec)} | keys)
        self.rank, self.steps = rank, []
        for member in range(WORLD_SIZE):
            settings = Settings.read(config, member, WORLD_SIZE)
            codes, buffers = CodeTable(settings.dtype, CPU, seed=0), Buffers(settings, CPU)
            verification = Verification(settings, codes, buffers.index, buffers.input_index)
            self.steps.append(FaultyStep(settings, buffers, codes, verification))
            if member == rank:
                self.codes, self.buffers, self.verification = codes, buffers, verification
        self.verification.rehearse()

    def full(self, iteration, layer):
        out = torch.empty(self.buffers.index.numel(), dtype=self.codes.dtype)
        self.codes.write(out, self.buffers.index, iteration, layer)
        return out

    def gathered(self, iteration, layer):
        return self.full(iteration, layer).view(WORLD_SIZE, -1)

    def reduced(self, iteration, layer, reduce=torch.sum):
        parts = torch.stack([step.gradient(iteration, layer) for step in self.steps])
        return reduce(parts, 0).view(WORLD_SIZE, -1)[self.rank]

    def run(self, num_steps=WARMUP + CHECKED + 2):
        def layer_of(tensors, wanted):
            return next(layer for layer, tensor in enumerate(tensors) if tensor is wanted)

        def all_gather(out, shard, **_):
            out.copy_(self.full(iteration, layer_of(self.buffers.shards, shard)))

        def reduce_scatter(out, _gradient, **_):
            out.copy_(self.reduced(iteration, layer_of(self.buffers.reduced, out)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedule, "all_gather", all_gather)
            patch.setattr(schedule, "reduce_scatter", reduce_scatter)
            for iteration in range(num_steps):
                self.steps[self.rank].run(iteration)
        return self.verification.failures()


def with_kind(spec, kind):
    return FaultSpec(kind, spec.iteration, spec.layer, spec.phase, spec.rank, spec.source_rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_right_data_has_no_failure(rank, dtype):
    assert OneRank(rank, FaultSpec(), dtype).run() == (0, [])


@pytest.mark.parametrize("kind", [kind for kind in GATHER_KINDS if kind != "swapped_shards"])
@bounded
@given(spec=faults)
def test_damaged_gather_is_located_and_named(kind, spec):
    count, (detail,) = OneRank(spec.rank, with_kind(spec, kind)).run()
    assert count == 1
    assert detail.kind == f"all_gather_{spec.phase}"
    assert (detail.iteration, detail.layer) == (spec.iteration, spec.layer)
    assert (detail.rank, detail.source_rank) == (spec.rank, spec.source_rank)
    assert detail.cause == CAUSES[kind]


@bounded
@given(spec=faults)
def test_swapped_shards_name_each_other(spec):
    other = (spec.source_rank + 1) % WORLD_SIZE
    count, details = OneRank(spec.rank, with_kind(spec, "swapped_shards")).run()
    assert count == 2
    assert {detail.source_rank: detail.cause for detail in details} == {
        spec.source_rank: f"the data of rank {other}",
        other: f"the data of rank {spec.source_rank}",
    }


@bounded
@given(spec=faults)
def test_stale_input_is_located_and_named(spec):
    count, (detail,) = OneRank(spec.rank, with_kind(spec, "stale_h2d")).run()
    assert (count, detail.kind, detail.iteration, detail.rank) == (1, "h2d", spec.iteration, spec.rank)
    assert (detail.layer, detail.source_rank) == (None, None)
    assert (detail.count, detail.total, detail.cause) == (INPUT_SIZE, INPUT_SIZE, CAUSES["stale_h2d"])


@bounded
@given(spec=faults, observer=st.integers(0, WORLD_SIZE - 1))
def test_dropped_gradient_is_seen_by_every_rank_and_names_its_source(spec, observer):
    count, details = OneRank(observer, with_kind(spec, "dropped_gradient")).run()
    assert count == len(details) == 2
    for detail in details:
        assert (detail.kind, detail.rank) == ("reduce_scatter", observer)
        assert (detail.iteration, detail.layer, detail.count) == (spec.iteration, spec.layer, detail.total)
        assert f"rank {detail.source_rank}'s contribution alone: the contribution of rank {spec.rank} is missing" in (
            detail.cause
        )
    neighbors = {(spec.rank - 1) % WORLD_SIZE: 2, (spec.rank + 1) % WORLD_SIZE: -1}
    assert {detail.source_rank: detail.actual / detail.expected for detail in details} == neighbors


@pytest.mark.parametrize(("operation", "reduce"), [("MAX", torch.amax), ("MIN", torch.amin)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reduction_with_another_operation_than_the_sum_is_found_and_named(operation, reduce, dtype):
    world = OneRank(1, FaultSpec(), dtype)
    world.verification.check_reduced(WARMUP, 0, world.reduced(WARMUP, 0, reduce))
    count, details = world.verification.failures()
    assert count == WORLD_SIZE
    assert all(detail.cause.endswith(f"or the reduction is {operation} instead of a sum") for detail in details)


@pytest.mark.parametrize("collective", ["gathered", "reduced"])
@pytest.mark.parametrize("offset", [1, -23, 16])
def test_one_wrong_element_is_not_said_to_be_of_another_origin(collective, offset):
    world = OneRank(0, FaultSpec())
    data = getattr(world, collective)(WARMUP, 0)
    row = data[1] if collective == "gathered" else data
    position = int((row.float() - 125).abs().argmin())
    row[position] += offset
    check = getattr(world.verification, f"check_{collective}")
    check(WARMUP, 0, *(["forward"] if collective == "gathered" else []), data)
    count, (detail,) = world.verification.failures()
    assert (count, detail.count) == (1, 1)
    assert detail.cause.endswith(f": off by {offset:+d}; one element does not identify an origin")


def changed(world, change, layer=0):
    """Return the gathered data of ``layer`` with ``change`` made to the row of rank 1."""
    chunks = world.gathered(WARMUP, layer)
    chunks[1] = change(chunks[1].clone(), chunks)
    return chunks


@each_of(
    "layer, received, cause",
    {
        "exchanged": (
            0,
            lambda world: changed(world, lambda row, _: torch.cat([row[:2].flip(0), row[2:]])),
            "permuted: the right",
        ),
        "right sum": (
            0,
            lambda world: changed(world, lambda row, _: torch.cat([row[:2] + torch.tensor([1, -1]), row[2:]])),
            "the sum is right, so the values may be at wrong positions",
        ),
        "contradicting sum": (
            0,
            lambda world: changed(world, lambda row, all_rows: all_rows[2] + 5 * torch.eye(SHARD_SIZE)[7]),
            "unknown",
        ),
        "another layer": (2, lambda world: world.gathered(WARMUP, 0), "the data of layer 0"),
        "next iteration": (0, lambda world: world.gathered(WARMUP + 1, 0), "too new: overwritten with the data of the"),
    },
)
def test_the_cause_follows_from_all_values_that_were_recorded(layer, received, cause):
    world = OneRank(0, FaultSpec(), "float32")
    world.verification.check_gathered(WARMUP, layer, "forward", received(world))
    _, details = world.verification.failures()
    assert [detail.cause for detail in details if cause not in detail.cause] == []


@bounded
@given(spec=faults)
def test_stale_gradient_is_wrong_from_every_source(spec):
    count, details = OneRank(spec.rank, with_kind(spec, "stale_gradient")).run()
    assert count == WORLD_SIZE
    assert {detail.source_rank for detail in details} == {None}
    assert sum(detail.count for detail in details) == SHARD_SIZE
    assert {detail.cause for detail in details} == {CAUSES["stale_gradient"]}


def test_first_index_expected_and_actual_are_those_of_the_data():
    spec = FaultSpec("partial_gather", iteration=1, layer=2, rank=0, source_rank=3)
    world = OneRank(0, spec)
    _, (detail,) = world.run()
    right, stale = (world.gathered(iteration, 2)[3] for iteration in (WARMUP + 1, WARMUP))
    first = SHARD_SIZE // 2
    assert (detail.index, detail.count, detail.total) == (first, SHARD_SIZE - first, SHARD_SIZE)
    assert (detail.expected, detail.actual) == (right[first].item(), stale[first].item())


def test_index_of_a_wrong_gradient_counts_within_the_ranks_shard():
    world = OneRank(1, FaultSpec())
    shard = world.reduced(WARMUP, 0)
    shard[42] = 0
    world.verification.check_reduced(WARMUP, 0, shard)
    count, (detail,) = world.verification.failures()
    assert (count, detail.index, detail.count) == (1, 42, 1)
    negative = (SHARD_SIZE + 42 + WARMUP + 1) % WORLD_SIZE
    assert detail.cause.endswith(f"zeroed: no data arrived, or the contribution of rank {negative} arrived twice")


def test_value_that_is_no_number_is_reported_in_words():
    world = OneRank(0, FaultSpec())
    chunks = world.gathered(WARMUP, 0)
    chunks[1, 5] = float("nan")
    world.verification.check_gathered(WARMUP, 0, "forward", chunks)
    _, (detail,) = world.verification.failures()
    assert (detail.index, detail.expected, detail.actual) == (None, None, None)
    assert detail.cause.startswith("first at index 5: expected ")
    assert "nan" in str(detail)


def test_all_failures_are_counted_and_only_the_first_are_detailed():
    world = OneRank(0, FaultSpec())
    nothing = torch.zeros(WORLD_SIZE, SHARD_SIZE, dtype=world.codes.dtype)
    for iteration in range(WARMUP, WARMUP + CHECKED):
        for layer in range(LAYERS):
            world.verification.check_gathered(iteration, layer, "forward", nothing)
    count, details = world.verification.failures()
    assert count == CHECKED * LAYERS * WORLD_SIZE
    assert len(details) == MAX_DETAILS
    assert details[0].iteration == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FaultSpec("stale_gather", iteration=3), r"iteration 3; .*allowed is 0\.\.2"),
        (FaultSpec("stale_gather", layer=3), r"layer 3; .*allowed is 0\.\.2"),
        (FaultSpec("stale_gather", rank=4), r"rank 4; .*allowed is 0\.\.3"),
        (FaultSpec("stale_gather", source_rank=4), r"source_rank 4; .*allowed is 0\.\.3"),
        (FaultSpec("weight", layer=0), "set optimizer to 'sgd'"),
    ],
)
def test_fault_that_cannot_happen_is_an_error_that_names_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message):
        spec.check(verify=CHECKED, layers=LAYERS, world_size=WORLD_SIZE, optimizer="none")
    with pytest.raises(ValueError, match=r"set optimizer|allowed is none"):
        spec.check(verify=0, layers=LAYERS, world_size=WORLD_SIZE, optimizer="none")


def test_weight_fault_changes_one_element_by_one_unit_in_the_last_place():
    world = OneRank(0, FaultSpec("weight", layer=1, rank=0), optimizer="sgd")
    before = [weights.clone() for weights in world.buffers.weights]
    for step in world.steps:
        step.end()
    changed = [[*(now != then).nonzero().flatten()] for now, then in zip(world.buffers.weights, before, strict=True)]
    assert changed == [[], [SHARD_SIZE - 1], []]
    assert world.buffers.weights[1][-1] == torch.nextafter(before[1][-1], torch.tensor(999.0))


@pytest.mark.parametrize(("steps", "is_exact"), [(66_840, True), (66_841, False)])
def test_more_sgd_steps_than_float32_counts_are_an_error(steps, is_exact):
    config = default_config("fsdp", steps=steps, warmup=0, verify=0, optimizer="sgd")
    if is_exact:
        assert Settings.read(config, 0, 2).iterations == steps
    else:
        with pytest.raises(ValueError, match="exact for at most 66840"):
            Settings.read(config, 0, 2)


@dataclass
class LoggingStream(Stream):
    log: list[str]

    def submit(self, transfer):
        number = transfer(False)
        self.log.append(f"submit {number}")
        return Work(lambda: self.log.append(f"wait {number}"))


def test_read_ahead_waits_at_once_for_a_transfer_in_line():
    stream = LoggingStream([])
    ahead = Prefetcher(stream, 1, lambda number: lambda _asynchronous: number, in_line=lambda number: number == 1)
    for number in range(2):
        ahead.take(number, last=1)
    assert stream.log == ["submit 0", "submit 1", "wait 1", "wait 0", "wait 1"]


def test_faults_of_time_strike_their_rank_and_their_kind_alone(monkeypatch):
    late = []
    monkeypatch.setattr(planted, "Delay", lambda _, delay_ms: lambda: late.append(("slowdown", delay_ms)))
    monkeypatch.setattr(planted.time, "sleep", lambda duration_s: late.append(("late_host", duration_s)))

    def strikes(kind, rank):
        late.clear()
        world = OneRank(rank, FaultSpec(kind, layer=1, rank=1, every=2, delay_ms=5))
        world.run(3)
        return [layer for layer in range(3) if world.steps[rank].runs_in_line(layer)], [*late]

    assert strikes("in_line", 1) == ([1], [])
    assert strikes("slowdown", 1) == ([], [("slowdown", 5)] * 2)
    assert strikes("late_host", 1) == ([], [("late_host", 0.005)] * 2)
    assert [strikes(kind, 0) for kind in ("in_line", "slowdown", "late_host")] == [([], [])] * 3
