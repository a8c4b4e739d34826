"""The axes of the Llama workloads: degrees, the data and shards of each rank, and refused combinations."""

import itertools
import sys
from contextlib import ExitStack

import pytest
import torch
from aorta_workloads.config import AxisDegrees
from aorta_workloads.distributed.context import GatheredAttention, own_positions
from aorta_workloads.distributed.expert import expert_placement, split_experts
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.models.common.attention import SDPA
from aorta_workloads.models.common.data import local_part
from aorta_workloads.models.common.float8 import check_float8
from aorta_workloads.models.common.moe import MoeFeedForward
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.rank.ranks import fake_group
from tests.unit.builders import each_of


class Coordinates:
    """A mesh's shape and this rank's coordinate in it, without a process group."""

    def __init__(self, sizes, place):
        self.sizes, self.place = sizes, place

    def size(self, axis=0):
        return self.sizes[axis]

    def get_local_rank(self, axis=0):
        return self.place[axis]


@pytest.mark.parametrize(
    ("given", "world_size", "degrees"),
    [
        (AxisDegrees(2, context_parallel_degree=2, tensor_parallel_degree=3), 36, (3, 6, 6)),
        # Stages share the work of a sequence.
        (AxisDegrees(pipeline_parallel_degree=2, tensor_parallel_degree=3), 24, (4, 4, 6)),
    ],
)
def test_shards_are_over_what_the_degrees_leave_of_the_world(given, world_size, degrees):
    dims = ParallelDims.of_world(given, world_size)
    assert (dims.data_parallel_shard, dims.data_parallel, dims.ranks_per_sequence) == degrees


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (AxisDegrees(2, tensor_parallel_degree=3), "8 ranks, not a multiple of .* x tensor_parallel_degree 3 = 6"),
        (AxisDegrees(expert_parallel_degree=3), "expert_parallel_degree is 3, and parameters are sharded over 8 ranks"),
    ],
)
def test_a_world_that_is_no_multiple_of_the_degrees_is_an_error_that_names_them(given, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims.of_world(given, 8)


def test_float8_without_a_gpu_is_an_error_that_says_what_is_lacking():
    message = r"float8_linear is true, and this launch is missing CUDA \(ranks are on cpu\)"
    with pytest.raises(RuntimeError, match=message):
        check_float8(torch.device("cpu"))


FLOAT8_GPUS = {
    "Ada": (None, (8, 9), ""),
    "Ampere": (None, (8, 6), r"compute capability \(8, 9\) \(the GPU has \(8, 6\)\) and "),
    "MI300": ("6.4", (9, 4), ""),
    "MI200": ("6.4", (9, 0), r"compute capability \(9, 4\) \(the GPU has \(9, 0\)\) and "),
}


@pytest.mark.parametrize(("hip", "found", "missing"), FLOAT8_GPUS.values(), ids=FLOAT8_GPUS, indirect=["hip"])
def test_float8_needs_a_gpu_that_multiplies_it(monkeypatch, hip, found, missing):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(RuntimeError, match=f"this launch is missing {missing}the package torchao$"):
        check_float8(torch.device("cuda"))


@pytest.fixture
def make_mesh():
    def make(rank, degrees, world_size=16):
        groups.close()
        groups.enter_context(fake_group(world_size, rank))
        return ParallelMesh(degrees, "cpu")

    with ExitStack() as groups:
        yield make


def test_what_a_rank_reads_depends_on_its_place_among_data_parallel_ranks_alone(make_mesh):
    places = []
    for rank in range(16):
        mesh = make_mesh(rank, ParallelDims(2, 2, 2, 2))
        places.append((mesh.data_rank, mesh.context_rank, mesh.counts_loss))

    assert [place[0] for place in places] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [place[1] for place in places] == [0, 0, 1, 1] * 4
    assert [place[2] for place in places] == [True, False] * 8
    assert mesh.whole.mesh_dim_names == ("dp_replicate", "fsdp", "tp")
    assert (mesh.whole.shape, mesh.data.shape) == ((2, 4, 2), (2, 4))


def test_parameters_of_distributed_experts_have_axes_of_their_own(make_mesh):
    mesh = make_mesh(5, ParallelDims(2, 4, 2, 1, expert_parallel=4))
    dense, experts = mesh.dense_axes, mesh.expert_axes

    assert (dense.whole.mesh_dim_names, dense.non_dp_mesh) == (("dp_replicate", "fsdp"), None)
    assert experts.whole.mesh_dim_names == ("dp_replicate", "expert_fsdp", "ep")
    assert (experts.replicas.size(), experts.shards.mesh.tolist(), experts.non_dp_mesh.size()) == (2, [1, 5], 4)
    alone = make_mesh(5, ParallelDims(1, 16, 1, 1, expert_parallel=16))
    assert (alone.expert_axes.replicas, alone.expert_axes.shards.size()) == (None, 1)
    plain = make_mesh(5, ParallelDims(1, 16, 1, 1))
    assert plain.expert_axes == plain.dense_axes


def test_an_axis_of_one_rank_is_left_out_and_the_shards_axis_is_not(make_mesh):
    alone = make_mesh(3, ParallelDims(1, 16, 1, 1))
    assert (alone.whole.mesh_dim_names, alone.data.shape) == (("fsdp",), (16,))
    assert (alone.replicas, alone.context, alone.tensor, alone.counts_loss) == (None, None, None, True)

    tensor = make_mesh(3, ParallelDims(1, 1, 1, 16))
    assert (tensor.whole.mesh_dim_names, tensor.shards.size(), tensor.data_rank) == (("fsdp", "tp"), 1, 0)


def test_a_stages_mesh_is_that_of_a_world_of_its_size(make_mesh):
    alone, places = [], []
    for rank in range(8):
        mesh = make_mesh(rank, ParallelDims(2, 1, 2, 2), world_size=8)
        alone.append((mesh.data_rank, mesh.context_rank, mesh.counts_loss))
    for rank in range(16):
        mesh = make_mesh(rank, ParallelDims(2, 1, 2, 2, pipeline_parallel=2))
        places.append((mesh.data_rank, mesh.context_rank, mesh.counts_loss))
        assert mesh.pipeline.get_local_rank() == rank // 8

    assert places == alone * 2
    assert (mesh.whole.mesh_dim_names, mesh.whole.shape) == (("dp_replicate", "fsdp", "tp"), (2, 2, 2))
    assert mesh.whole.mesh.flatten().tolist() == list(range(8, 16))
    assert mesh.context.mesh.tolist() == [13, 15]


def test_context_parallelism_of_the_whole_world_has_a_process_group_of_its_own(make_mesh):
    mesh = make_mesh(0, ParallelDims(1, 1, 16, 1))

    assert mesh.context.get_group().group_name != mesh.shards.get_group().group_name


def test_experts_are_shared_out_among_neighbours_that_share_parameters(make_mesh):
    mesh = make_mesh(5, ParallelDims(2, 4, 2, 1, expert_parallel=4))

    assert mesh.experts.mesh.tolist() == [4, 5, 6, 7]
    assert mesh.expert_data.mesh.tolist() == [[1, 5], [9, 13]]
    assert mesh.data.shape == (2, 8)
    assert make_mesh(5, ParallelDims(1, 16, 1, 1)).experts is None


@each_of("num_experts, dim, along", {"experts": (16, 64, 0), "width": (8, 64, 1), "uneven": (8, 66, 0)})
def test_data_parallelism_shards_experts_along_a_dim_that_divides(make_mesh, num_experts, dim, along):
    mesh = make_mesh(0, ParallelDims(1, 16, 1, 1, expert_parallel=4))
    with torch.device("meta"):
        moe = MoeFeedForward(dim, 64, num_experts, 2)

    split_experts(moe, mesh.experts, distributed=True, tensor_parallel=False)

    assert moe.experts.w1.to_local().shape == (num_experts // 4, 64, dim)
    assert expert_placement(moe.experts, mesh.expert_data) == Shard(along)


EXPERT_LAYOUTS = {
    "replicas": (ParallelDims(2, 4, 1, 2, expert_parallel=4), True, (4, 2)),
    "shards": (ParallelDims(1, 8, 1, 2, expert_parallel=2), True, (2, 2)),
    "tensor parallel alone": (ParallelDims(2, 4, 1, 2), False, (1, 2)),
}


@each_of("degrees, distributed, shares", EXPERT_LAYOUTS)
def test_tensor_parallelism_splits_the_hidden_dimension_of_each_expert(make_mesh, degrees, distributed, shares):
    mesh = make_mesh(5, degrees)
    with torch.device("meta"):
        moe = MoeFeedForward(32, 64, 8, 2)

    split_experts(moe, mesh.expert_axes.non_dp_mesh, distributed=distributed, tensor_parallel=True)

    experts, hidden = 8 // shares[0], 64 // shares[1]
    assert moe.experts.w1.to_local().shape == moe.experts.w3.to_local().shape == (experts, hidden, 32)
    assert moe.experts.w2.to_local().shape == (experts, 32, hidden)
    assert mesh.tensor.get_local_rank() == mesh.expert_axes.non_dp_mesh.get_local_rank("tp") == 1


@given(rows=st.integers(0, 9), columns=st.integers(1, 6), shards=st.integers(1, 4), splits=st.integers(1, 3))
def test_parts_of_all_ranks_are_the_whole_once_a_replica(rows, columns, shards, splits):
    value = torch.arange(rows * columns).view(rows, columns)
    for inner in (Shard(0), Shard(1), Replicate()):
        outer = _StridedShard(0, split_factor=splits) if inner == Shard(0) else Shard(0)
        parts = [
            local_part(value, Coordinates((2, shards, splits), place), [Replicate(), outer, inner])
            for place in itertools.product(range(2), range(shards), range(splits))
        ]
        times = 2 * (splits if inner == Replicate() else 1)
        held = torch.cat([part.flatten() for part in parts])
        assert torch.equal(held.sort().values, value.flatten().repeat_interleave(times))


def test_a_rank_holds_a_shard_of_what_tensor_parallelism_gave_it():
    value = torch.arange(8)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]

    assert local_part(value, Coordinates((2, 2), (0, 1)), placements).tolist() == [4, 5]
    assert local_part(value, Coordinates((2, 2), (1, 0)), placements).tolist() == [2, 3]


@given(chunk=st.integers(1, 4), num_ranks=st.integers(2, 4))
def test_ranks_share_the_positions_of_a_sequence_and_the_pairs_to_score(chunk, num_ranks):
    shares = [own_positions(2 * num_ranks * chunk, num_ranks, rank) for rank in range(num_ranks)]

    assert torch.equal(torch.cat(shares).sort().values, torch.arange(2 * num_ranks * chunk))
    assert len({int((share + 1).sum()) for share in shares}) == 1


def test_one_rank_takes_a_sequence_of_any_length():
    assert own_positions(3, 1, 0).tolist() == [0, 1, 2]


class Gathered(GatheredAttention):
    """Attention on one rank of several, whose gather returns given parts in the order of ranks."""

    def __init__(self, mesh, seq_len, attend, wholes):
        super().__init__(mesh, seq_len, attend)
        self._wholes = iter(wholes)

    def _all_gather(self, tensor):
        return next(self._wholes)


@pytest.mark.parametrize("kernel", ["flash", "math", "flex"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_attention_to_gathered_keys_is_that_of_the_whole_sequence(num_ranks, kernel):
    attend_whole = SDPA(kernel)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    whole = attend_whole(q, k, v)
    shares = [own_positions(12, num_ranks, rank) for rank in range(num_ranks)]
    gathered = [tensor[:, :, torch.cat(shares)] for tensor in (k, v)]

    for rank, share in enumerate(shares):
        attend = Gathered(Coordinates((num_ranks,), (rank,)), 12, attend_whole, gathered)
        torch.testing.assert_close(attend(q[:, :, share], k[:, :, share], v[:, :, share]), whole[:, :, share])
