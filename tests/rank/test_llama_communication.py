"""The keys of communication of the Llama workloads: symmetric memory and async tensor parallelism."""

import os
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from aorta_workloads.distributed.fsdp2 import check_all_gather, reduce_into_memory_of_compute
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.distributed.tensor import apply_tensor_parallel
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.models import build_model
from aorta_workloads.models.config import ModelConfig
from aorta_workloads.passes.async_tensor import micro_pipeline_options
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

from tests.rank.ranks import fake_group, left_at_the_end, run_two_ranks
from tests.rank.settings import make_settings

with warnings.catch_warnings():
    # Inductor imports a module of torch that uses the deprecated decorator.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method`", category=DeprecationWarning)
    from aorta_workloads.passes.async_tensor import FlattenGathers
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass


def test_all_gathers_name_why_they_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    with pytest.raises(ValueError, match="parameters are on one rank"):
        check_all_gather("symmetric", 1)
    with pytest.raises(ValueError, match=r"NCCL is 2\.27\.5; all-gathers of this kind came with NCCL 2\.28"):
        check_all_gather("copy_engine", 2)
    check_all_gather("symmetric", 2)


VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_CTA_POLICY")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({}, ("given", "given", "given")),
        ({"async_tensor_parallel": True}, ("0", "1", "given")),
        ({"all_gather": "symmetric"}, ("0", "1", "given")),
        ({"all_gather": "copy_engine"}, ("0", "1", "2")),
    ],
)
def test_symmetric_memory_turns_multicast_off_whatever_was_set(monkeypatch, keys, values):
    for name in VARIABLES:
        monkeypatch.setenv(name, "given")
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys)

    settings.prepare_environment()

    assert tuple(os.environ.get(name) for name in VARIABLES) == values


@pytest.mark.parametrize(
    ("version", "given", "keys", "segments"),
    [
        ("13.0", "", {}, "expandable_segments:True"),
        ("13.0", "PYTORCH_CUDA_ALLOC_CONF", {}, None),
        ("13.0", "", {"all_gather": "symmetric"}, None),
        (None, "", {}, None),
    ],
)
def test_memory_of_cuda_grows_unless_its_allocator_is_set(monkeypatch, version, given, keys, segments):
    monkeypatch.setattr(torch.version, "cuda", version)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # What is set once is set back at the end, also where the settings set it.
        monkeypatch.setenv(name, "max_split_size_mb:512")
        if name != given:
            monkeypatch.delenv(name)

    make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys).prepare_environment()

    assert os.environ.get("PYTORCH_ALLOC_CONF") == segments


@pytest.fixture
def tensor_mesh():
    with fake_group(2):
        yield ParallelMesh(ParallelDims(1, 1, 1, 2), "cpu")


def collectives_of_a_block(mesh, batch_size):
    """Return the collectives in the graph of a block's forward pass after inductor's pass for async TP."""
    model = build_model(ModelConfig(64, 1, 4, 2, 192, 256, 500000.0, 1e-5))
    apply_tensor_parallel(model, mesh.tensor, chunked_loss=False)
    options = micro_pipeline_options(mesh.tensor)
    found = []

    def compile_graph(module, _inputs):
        view_to_reshape(module)
        options["post_grad_custom_pre_pass"](module.graph)
        module.graph.lint()
        micro_pipeline_tp_pass(module.graph)
        targets = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        names = [target.name() for target in targets if target.namespace in ("symm_mem", "_c10d_functional")]
        found.append(Counter(name for name in names if "wait_tensor" not in name))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())
    torch.compiler.reset()
    with torch.no_grad():
        block = torch.compile(model.layers[0], backend=backend, fullgraph=True, dynamic=False)
        # A fused collective has no kernel for CPU ranks, so the graph is made but can't run.
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            block(torch.randn(batch_size, 16, 64), model.config.freqs_cis(torch.arange(32)))
    assert found, caught.value
    return found[0]


def test_products_are_divided_only_where_the_compile_call_asks_for_it(tensor_mesh):
    options = micro_pipeline_options(tensor_mesh.tensor)

    torch.compile(lambda x: x, options=options)
    assert (inductor._micro_pipeline_tp, inductor.post_grad_custom_pre_pass) == (False, None)
    with inductor.patch(options):
        assert inductor._micro_pipeline_tp


def _reduce_both_ways(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # CPU ranks have no streams, and None selects none.
    torch.cuda.current_stream = lambda: None
    gradients = []
    with left_at_the_end():
        for change in (lambda _: None, reduce_into_memory_of_compute):
            torch.manual_seed(0)
            model = fully_shard(torch.nn.Linear(4, 4))
            change(model)
            model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
            gradients.append(model.weight.grad.full_tensor())
    assert torch.equal(*gradients)


def test_gradients_in_memory_of_compute_have_the_same_bits(tmp_path):
    run_two_ranks(_reduce_both_ways, str(tmp_path))


@pytest.mark.filterwarnings("ignore:erase_node")  # torch 2.11 erases each product that it has fused twice
@pytest.mark.parametrize("batch_size", [1, 2])
def test_all_collectives_of_a_block_are_fused_with_their_products(monkeypatch, tensor_mesh, batch_size):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    assert collectives_of_a_block(tensor_mesh, batch_size) == {
        "symm_mem::fused_all_gather_matmul": 2,
        "symm_mem::fused_matmul_reduce_scatter": 2,
    }


def test_a_sequence_gathered_as_a_matrix_has_the_same_values(tensor_mesh):
    group = tensor_mesh.tensor.get_group().group_name

    def function(x, weight):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group)
        whole = torch.ops._c10d_functional.wait_tensor(gathered).view(1, 8, 4)
        return whole.view(8, 4) @ weight, whole.sum(-1), whole

    given = torch.randn(1, 4, 4), torch.randn(4, 3)
    module = make_fx(function, tracing_mode="fake")(*given)
    expected = _with_gathers_of_copies(module)(*given)

    FlattenGathers(group)(module.graph)
    module.graph.lint()

    gathers = module.graph.find_nodes(op="call_function", target=GATHER)
    assert [gather.args[0].meta["val"].shape for gather in gathers] == [torch.Size([4, 4])]
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert product.args[0].target is torch.ops._c10d_functional.wait_tensor.default
    for value, same in zip(_with_gathers_of_copies(module)(*given), expected, strict=True):
        assert torch.equal(value, same)


GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def _with_gathers_of_copies(module):
    """Return the module with a gather that repeats this rank's part; the fake process group gathers nothing."""

    class Interpreter(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            return torch.cat([args[0]] * args[1]) if target is GATHER else super().call_function(target, args, kwargs)

    return Interpreter(module).run
