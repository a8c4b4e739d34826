"""Hashes of sharded tensors against hashes of one rank; this process acts as each rank of a mesh in turn."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_aorta.worker import weight_hash
from tests.rank.ranks import fake_group, left_at_the_end, run_two_ranks

settings.register_profile("shared-host", deadline=None, max_examples=25)
settings.load_profile("shared-host")
MESHES = st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64])


@contextmanager
def rank_of(mesh_shape, rank, names=None):
    with fake_group(math.prod(mesh_shape), rank):
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)


def values(shape, dtype):
    raw = torch.randint(-128, 128, (math.prod(shape) * dtype.itemsize,), generator=torch.Generator().manual_seed(1))
    return raw.to(torch.int8).view(dtype).view(shape)


def facts_of_ranks(mesh_shape, make, names=None):
    """Return the facts that ranks would gather: each rank's facts of the tensor that ``make`` returns."""
    facts = []
    for rank in range(math.prod(mesh_shape)):
        # Run no operations on DTensors: torch caches the meshes of results, and would return an earlier rank's mesh.
        with rank_of(mesh_shape, rank, names) as mesh, torch.no_grad():
            piece = weight_hash._dtensor_or_replica("w", make(mesh))
            facts.append(weight_hash._local_facts([[piece]])[0])
    return piece.signature, torch.stack(facts)


def sums_of_ranks(mesh_shape, make, names=None):
    signature, facts = facts_of_ranks(mesh_shape, make, names)
    [sums] = weight_hash._logical_sums([signature], facts[:, None])
    return sums


def sums_of_one_rank(tensor):
    piece = weight_hash._dtensor_or_replica("w", tensor)
    [sums] = weight_hash._logical_sums([piece.signature], weight_hash._local_facts([[piece]])[None])
    return sums


def test_shards_are_not_hashed_after_the_process_group_has_gone():
    with rank_of((2,), 1) as mesh, torch.no_grad():
        shard = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"^w is a shard and there is no process group: hash weights before leaving"):
        weight_hash.hash_parameters([("w", shard)])


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), MESHES, DTYPES, st.data())
def test_any_placement_of_any_tensor_hashes_like_one_rank(shape, mesh_shape, dtype, data):
    place = st.one_of(st.builds(Replicate), st.builds(Shard, st.integers(0, len(shape) - 1)))
    placements = data.draw(st.tuples(*[place] * len(mesh_shape)))
    tensor = values(shape, dtype)

    def make(mesh):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    assert sums_of_ranks(mesh_shape, make) == sums_of_one_rank(tensor)


def fsdp_of_tensor_parallel(tensor, dim):
    """Return a parameter that tensor parallelism has split along ``dim`` and FSDP2 then shards."""

    def make(mesh):
        module = torch.nn.Module()
        cut = distribute_tensor(tensor, mesh["tp"], [Shard(dim)], src_data_rank=None)
        module.weight = torch.nn.Parameter(cut)
        sharded = fully_shard(module, mesh=mesh["dp"]).weight
        # Torch also caches the mesh that FSDP2 composes, with the coordinate of an earlier rank.
        layout = {"shape": sharded.shape, "stride": sharded.stride(), "run_check": False}
        return DTensor.from_local(sharded.to_local(), mesh, sharded.placements, **layout)

    return make


@settings(max_examples=12)
@given(st.integers(1, 20), st.sampled_from([(2, 2), (4, 3), (3, 4)]), st.sampled_from([0, 1]))
@example(14, (4, 3), 0)
def test_fsdp2_of_tensor_parallel_hashes_like_one_rank_however_uneven(rows, mesh_shape, dim):
    tensor = values((rows, 6), torch.float32)
    made = fsdp_of_tensor_parallel(tensor, dim)

    assert sums_of_ranks(mesh_shape, made, ("dp", "tp")) == sums_of_one_rank(tensor)


def test_replicas_that_differ_are_an_error_that_names_the_ranks():
    tensor = torch.arange(8.0)
    copies = [tensor, tensor, tensor.clone().index_fill_(0, torch.tensor([3]), -3.0), tensor]
    ranks = iter(copies)

    with pytest.raises(RuntimeError, match=r"replicas of w differ between ranks \[0, 1, 3\] and ranks \[2\]: a race, "):
        sums_of_ranks((4,), lambda mesh: next(ranks))


def _hash_shards(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with left_at_the_end():
        for size in (4, 4 + rank):
            flat = torch.nn.Parameter(torch.full([size], float(rank)))
            flat._is_flat_param = True
            with pytest.raises(RuntimeError) as found:
                weight_hash.hash_parameters([("_flat_param", flat)])
            assert str(found.value).count("inside of FullyShardedDataParallel.summon_full_params") == 1


def test_shards_of_fsdp1_are_an_error_that_says_what_to_do(tmp_path):
    run_two_ranks(_hash_shards, str(tmp_path))


def test_replicas_of_a_shard_that_differ_are_an_error():
    tensors = iter([torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.ones(4)])

    def make(mesh):
        return distribute_tensor(next(tensors), mesh, [Replicate(), Shard(0)], src_data_rank=None)

    with pytest.raises(RuntimeError, match=r"replicas of w differ between ranks \[1\] and ranks \[3\]"):
        sums_of_ranks((2, 2), make)


def test_number_of_elements_against_the_placements_is_an_error_on_every_rank():
    def make(mesh):
        shard = torch.zeros(2 if mesh.get_rank() == 1 else 4)
        return DTensor.from_local(shard, mesh, [Shard(0)], shape=(8,), stride=(1,))

    message = r"w: ranks \[1\] hold a number of elements that contradicts their placements of \(8,\)"
    with pytest.raises(RuntimeError, match=message):
        sums_of_ranks((2,), make)


def test_a_partial_tensor_is_an_error_that_names_it():
    def make(mesh):
        return DTensor.from_local(torch.zeros(4), mesh, [Partial()])

    with pytest.raises(ValueError, match=r"w: P.* has no value yet"):
        sums_of_ranks((2,), make)
