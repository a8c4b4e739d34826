"""Every fault planted in the fsdp workload's data is found, counted, located and named, without ranks."""

from dataclasses import dataclass, replace

import pytest
import torch
from aorta_workloads.common.streams import Prefetcher, Stream, Work
from aorta_workloads.fsdp.faults import GATHER_KINDS, Fault, FaultSpec
from aorta_workloads.fsdp.oracle import INPUT_SLOTS, CodeTable, Contribution, chunk_index, world_index
from aorta_workloads.fsdp.settings import Settings
from aorta_workloads.fsdp.verification import MAX_DETAILS, Verification
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.settings import default_config

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
SETTINGS = Settings.read(default_config("fsdp", warmup=WARMUP, verify=CHECKED, **SIZES), 0, WORLD_SIZE)
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
    """The data that one rank of a world of ``WORLD_SIZE`` receives; every rank's part is computed in this process."""

    def __init__(self, rank, spec, dtype=torch.bfloat16):
        self.rank = rank
        self.codes = CodeTable(dtype, CPU, seed=0)
        self.index = world_index(SHARD_SIZE, WORLD_SIZE)
        self.input_index = chunk_index(INPUT_SIZE, rank)
        chunks = self.index.view(WORLD_SIZE, -1)
        self.faults = [
            Fault(spec, self.codes, chunks, rank=member, first_checked=WARMUP) for member in range(WORLD_SIZE)
        ]
        self.verification = Verification(replace(SETTINGS, rank=rank), self.codes, self.index, self.input_index)
        self.verification.rehearse()

    def full(self, iteration, layer):
        out = torch.empty(self.index.numel(), dtype=self.codes.dtype)
        self.codes.write(out, self.index, iteration, layer)
        return out

    def input(self, iteration):
        slot = self.faults[self.rank].input_iteration(iteration) % INPUT_SLOTS
        out = torch.empty(INPUT_SIZE, dtype=self.codes.dtype)
        self.codes.write(out, self.input_index, slot, LAYERS)
        return out

    def gathered(self, iteration, layer, phase):
        chunks = self.full(iteration, layer).view(WORLD_SIZE, -1)
        self.faults[self.rank].on_gathered(chunks, iteration, layer, phase)
        return chunks

    def reduced(self, iteration, layer):
        total = torch.zeros(self.index.numel(), dtype=self.codes.dtype)
        for member, fault in enumerate(self.faults):
            part = self.full(iteration, layer)
            Contribution(WORLD_SIZE, member, part.dtype, CPU).keep_own(part, iteration)
            fault.on_gradient(part, iteration, layer)
            total += part
        shard = total.view(WORLD_SIZE, -1)[self.rank]
        self.faults[self.rank].on_reduced(shard, iteration, layer)
        return shard

    def run(self):
        for iteration in range(WARMUP + CHECKED + 2):
            self.verification.check_input(iteration, self.input(iteration))
            for layer in range(LAYERS):
                for phase in PHASES:
                    gathered = self.gathered(iteration, layer, phase)
                    self.verification.check_gathered(iteration, layer, phase, gathered)
                self.verification.check_reduced(iteration, layer, self.reduced(iteration, layer))
        return self.verification.failures()


def with_kind(spec, kind):
    return FaultSpec(kind, spec.iteration, spec.layer, spec.phase, spec.rank, spec.source_rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reduction_with_another_operation_than_the_sum_is_found_and_named(operation, reduce, dtype):
    world = OneRank(1, FaultSpec(), dtype)
    parts = []
    for member in range(WORLD_SIZE):
        part = world.full(WARMUP, 0)
        Contribution(WORLD_SIZE, member, dtype, CPU).keep_own(part, WARMUP)
        parts.append(part)
    world.verification.check_reduced(WARMUP, 0, reduce(torch.stack(parts), 0).view(WORLD_SIZE, -1)[1])
    count, details = world.verification.failures()
    assert count == WORLD_SIZE
    assert all(detail.cause.endswith(f"or the reduction is {operation} instead of a sum") for detail in details)


@pytest.mark.parametrize("collective", ["gathered", "reduced"])
@pytest.mark.parametrize("offset", [1, -23, 16])
def test_one_wrong_element_is_not_said_to_be_of_another_origin(collective, offset):
    world = OneRank(0, FaultSpec())
    data = getattr(world, collective)(WARMUP, 0, *(["forward"] if collective == "gathered" else []))
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
    chunks = world.full(WARMUP, layer).view(WORLD_SIZE, -1)
    chunks[1] = change(chunks[1].clone(), chunks)
    return chunks


@pytest.mark.parametrize(
    ("layer", "received", "cause"),
    [
        (0, lambda world: changed(world, lambda row, _: torch.cat([row[:2].flip(0), row[2:]])), "permuted: the right"),
        (
            0,
            lambda world: changed(world, lambda row, _: torch.cat([row[:2] + torch.tensor([1, -1]), row[2:]])),
            "the sum is right, so the values may be at wrong positions",
        ),
        (0, lambda world: changed(world, lambda row, all_rows: all_rows[2] + 5 * torch.eye(SHARD_SIZE)[7]), "unknown"),
        (2, lambda world: world.full(WARMUP, 0).view(WORLD_SIZE, -1), "the data of layer 0"),
        (0, lambda world: world.full(WARMUP + 1, 0).view(WORLD_SIZE, -1), "too new: overwritten with the data of the"),
    ],
    ids=["exchanged", "right sum", "contradicting sum", "another layer", "next iteration"],
)
def test_the_cause_follows_from_all_values_that_were_recorded(layer, received, cause):
    world = OneRank(0, FaultSpec(), torch.float32)
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


@bounded
@given(spec=faults)
def test_fault_of_another_rank_leaves_this_one_alone(spec):
    bystander = (spec.rank + 1) % WORLD_SIZE
    assert OneRank(bystander, with_kind(spec, "stale_gather")).run() == (0, [])


def test_first_index_expected_and_actual_are_those_of_the_data():
    spec = FaultSpec("partial_gather", iteration=1, layer=2, rank=0, source_rank=3)
    world = OneRank(0, spec)
    _, (detail,) = world.run()
    right, stale = (world.full(iteration, 2).view(WORLD_SIZE, -1)[3] for iteration in (WARMUP + 1, WARMUP))
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
    chunks = world.full(WARMUP, 0).view(WORLD_SIZE, -1)
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
    world = OneRank(0, FaultSpec("weight", rank=0))
    weights = torch.full((5,), 7.0)
    world.faults[0].on_final_weights(weights)
    assert weights[:4].tolist() == [7.0] * 4
    assert weights[4] == torch.nextafter(torch.tensor(7.0), torch.tensor(8.0))


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


@pytest.mark.parametrize(
    ("depth", "log"),
    [
        (0, ["submit 0", "wait 0", "submit 1", "wait 1"]),
        (1, ["submit 0", "submit 1", "wait 0", "wait 1"]),
    ],
)
def test_read_ahead_submits_depth_turns_early_but_not_beyond_the_last(depth, log):
    stream = LoggingStream([])
    ahead = Prefetcher(stream, depth, lambda number: lambda _asynchronous: number)
    for number in range(2):
        ahead.take(number, last=1)
    assert stream.log == log


def test_read_ahead_waits_at_once_for_a_transfer_in_line():
    stream = LoggingStream([])
    ahead = Prefetcher(stream, 1, lambda number: lambda _asynchronous: number, in_line=lambda number: number == 1)
    for number in range(2):
        ahead.take(number, last=1)
    assert stream.log == ["submit 0", "submit 1", "wait 1", "wait 0", "wait 1"]


def test_faults_of_time_strike_their_rank_and_their_kind_alone():
    def strikes(kind, rank):
        spec = FaultSpec(kind, layer=1, rank=1, every=2)
        codes, chunks = CodeTable(torch.float32, CPU, seed=0), world_index(SHARD_SIZE, WORLD_SIZE).view(WORLD_SIZE, -1)
        fault = Fault(spec, codes, chunks, rank=rank, first_checked=0)
        by_layer = [fault.runs_in_line(layer) for layer in range(3)]
        return by_layer, *([fault.is_due(kind, number) for number in (0, 1)] for kind in ("slowdown", "late_host"))

    never = [False, False]
    assert strikes("in_line", 1) == ([False, True, False], never, never)
    assert strikes("slowdown", 1) == ([False] * 3, [True, False], never)
    assert strikes("late_host", 1) == ([False] * 3, never, [True, False])
    assert {str(strikes(kind, 0)) for kind in ("in_line", "slowdown", "late_host")} == {str(strikes("none", 1))}
