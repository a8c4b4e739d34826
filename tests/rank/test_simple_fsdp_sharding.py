"""Shards and dtypes of llama_simple_fsdp, in one process of a world of four whose process group does nothing."""

import warnings

import pytest
import torch
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.distributed.parallelize import parallelize
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload
from aorta_workloads.models import build_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rank.ranks import fake_group
from tests.rank.settings import default_config

with warnings.catch_warnings():
    # Inductor imports a module of torch that uses the deprecated decorator.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method`", category=DeprecationWarning)
    from aorta_workloads.distributed.simple_fsdp import shard_parameters
    from aorta_workloads.llama_simple_fsdp.workload import LlamaSimpleFsdpWorkload

LAYOUTS = {
    "FSDP 4": {},
    "HSDP 2x2": {"data_parallel_replicate_degree": 2},
    "FSDP 2, TP 2": {"tensor_parallel_degree": 2},
    "4 experts, FSDP 2 x EP 2": {"num_experts": 4, "expert_parallel_degree": 2},
}


@pytest.fixture(scope="module", autouse=True)
def world_of_four():
    with fake_group(4):
        yield


def shards(implementation, changes):
    """Return placements and local shape of each parameter."""
    workload = implementation(default_config(implementation.name, **changes))
    settings = workload.settings.with_kernels("flash")
    mesh = ParallelMesh(ParallelDims.of_world(settings.degrees, 4), "cpu")
    with torch.device("meta"):
        model = build_model(settings.model)
    parallelize(model, mesh, settings)
    workload.shard(model, mesh, settings)
    return {name: (p.placements, p.device_mesh.shape, p.to_local().shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_the_shards_of_fsdp2(layout):
    expected = shards(LlamaFsdp2Workload, LAYOUTS[layout])
    assert shards(LlamaSimpleFsdpWorkload, LAYOUTS[layout]) == expected


KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Collectives(TorchDispatchMode):
    """Collects the dtype that each kind of collective moves."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ in KINDS:
            self.dtypes.setdefault(func.overloadpacket.__name__, args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("gathered", "reduced"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_parameters_are_gathered_and_gradients_summed_in_their_dtypes(gathered, reduced):
    model = torch.nn.Linear(8, 8, bias=False)
    shard_parameters(model, ParallelMesh(ParallelDims(2, 2, 1, 1), "cpu"), MixedPrecisionPolicy(gathered, reduced))

    with Collectives() as collectives:
        model(torch.ones(2, 8, dtype=gathered)).sum().backward()

    assert collectives.dtypes == {
        "all_gather_into_tensor": gathered,
        "reduce_scatter_tensor": reduced,
        "all_reduce": reduced,
    }
    assert model.weight.dtype == gathered
    (parameter,) = model.parameters()
    assert parameter.dtype == parameter.grad.dtype == torch.float32
