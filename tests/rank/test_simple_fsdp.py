"""Buckets, settings, labels and passes of llama_simple_fsdp, in one process with a process group that does nothing."""

import re
import warnings
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from aorta_workloads.distributed.activation_checkpoint import checkpoint_blocks
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.distributed.pipeline import keep_stage
from aorta_workloads.models import build_model
from aorta_workloads.models.config import ModelConfig
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.builders import each_of

with warnings.catch_warnings():
    # Inductor imports a module of torch that uses the deprecated decorator.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method`", category=DeprecationWarning)
    from aorta_workloads.config import GraphSettings
    from aorta_workloads.distributed.simple_fsdp import (
        block_buckets,
        buckets_of_stage,
        collective_groups,
        module_buckets,
        no_reorder_buckets,
        shard_parameters,
    )
    from aorta_workloads.passes import compile, reorder
    from aorta_workloads.passes.annotate import POSITION, CollectiveGroups, Traced, check_labels, label_reductions
    from aorta_workloads.passes.bucket import bucket_collectives
    from aorta_workloads.passes.cuda_graph import CapturedStep
    from aorta_workloads.passes.partition import order_saved
    from aorta_workloads.passes.reorder import estimate_ms

from tests.rank.ranks import fake_group

DEBUG = ModelConfig(64, 2, 4, 2, 192, 256, 500000.0, 1e-5)
ONE_BLOCK = replace(DEBUG, n_layers=1)
BOXED = compile.boxed_nop
PLANNED = GraphSettings("aot_eager", "transformer_block", (), "registration", True, True)
UNGROUPED = CollectiveGroups(None, None)
REDUCTIONS = ("is_sharded", "is_replicated")
EAGER = {"backend": "eager", "bucketing": "none", "overlap_reorder": False, "reshard_after_forward": False}


@pytest.fixture(scope="module")
def mesh():
    with fake_group(2):
        yield ParallelMesh(ParallelDims(1, 2, 1, 1), "cpu")


def make_model(config=DEBUG):
    with torch.device("meta"):
        return build_model(config)


def make_sharded(mesh, dtype=torch.float32, config=DEBUG, stage=None):
    model = make_model(config)
    if stage is not None:
        keep_stage(model, 2, stage)
    shard_parameters(model, mesh, MixedPrecisionPolicy(dtype, torch.float32))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def compile_model(model, mesh, settings, buckets=(), no_reorder=(), **extra):
    """Compile a sharded model as the workload does, with ``extra`` parameters that the model does not have."""
    torch.compiler.reset()
    parameters = dict(model.named_parameters()) | extra
    groups = collective_groups(model, mesh) | dict.fromkeys(extra, UNGROUPED)
    backend = compile.make_backend(settings, parameters, buckets, groups, no_reorder)
    model.compile(backend=backend, fullgraph=True, dynamic=False)


def names_of(model, prefix):
    return tuple(name for name, _ in model.named_parameters() if name.startswith(prefix))


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


def count(profile, name):
    return sum(event.count for event in profile.key_averages() if event.key.startswith(f"_c10d_functional::{name}"))


def run_a_step(mesh, blocks_per_bucket=1, stage=None, **given):
    """Compile a model, or the stage of this number of two, and run a step; return a function that runs forward."""
    model, whole = make_sharded(mesh, stage=stage), make_model()
    settings = replace(PLANNED, **given)
    buckets = block_buckets(model, blocks_per_bucket) if settings.bucketing == "transformer_block" else ()
    if settings.bucketing == "manual":
        buckets = buckets_of_stage(model, module_buckets(whole, settings.bucket_modules))
    no_reorder = no_reorder_buckets(whole, buckets, settings.overlap_reorder_modules)
    compile_model(model, mesh, settings, buckets, no_reorder)
    tokens, freqs_cis = torch.zeros(2, 8, dtype=torch.int64), model.config.freqs_cis(torch.arange(8))
    model(tokens, freqs_cis).sum().backward()
    return lambda: model(tokens, freqs_cis).sum()


def collectives_of_a_step(mesh, **given):
    """Return the number of all-gathers in forward, and of all-gathers and reduce-scatters in backward."""
    run = run_a_step(mesh, **given)
    with profiled() as forward:
        loss = run()
    with profiled() as backward:
        loss.backward()
    return count(forward, "all_gather"), count(backward, "all_gather"), count(backward, "reduce_scatter")


@pytest.mark.parametrize(("size", "groups"), [(1, [(0,), (1,), (2,)]), (2, [(0, 1), (2,)]), (5, [(0, 1, 2)])])
def test_consecutive_blocks_share_a_bucket_and_so_do_parameters_before_or_after_them(size, groups):
    model = make_model(replace(DEBUG, n_layers=3))
    assert block_buckets(model, size) == (
        ("tok_embeddings.weight",),
        *(tuple(name for number in group for name in names_of(model, f"layers.{number}.")) for group in groups),
        ("norm.weight", "output.weight"),
    )


def test_a_model_without_blocks_is_an_error():
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList"):
        block_buckets(nn.Linear(2, 2))


def test_a_range_is_a_bucket_each_and_a_plus_joins():
    model = make_model()

    assert module_buckets(model, ["tok_embeddings", "layers.[0-1]", "norm + output"]) == (
        names_of(model, "tok_embeddings"),
        names_of(model, "layers.0."),
        names_of(model, "layers.1."),
        ("norm.weight", "output.weight"),
    )
    assert module_buckets(model, ["layers.[0-1]+norm", "output+tok_embeddings"]) == (
        (*names_of(model, "layers."), "norm.weight"),
        ("output.weight", "tok_embeddings.weight"),
    )


MISFITS = {
    "unknown": (
        ["tok_embeddings", "layers.[0-5]", "norm+output"],
        r"no modules \['layers.2', .*'layers.5'\]; .*tok_embeddings",
    ),
    "left out": (["tok_embeddings", "layers.[0-1]", "norm"], r"in no group are \['output.weight'\]"),
    "twice": (
        ["tok_embeddings", "layers", "norm+output", "layers.0.ffn_norm"],
        r"more than one .*\['layers.0.ffn_norm.weight'",
    ),
    "empty range": (["layers.[1-0]"], "empty range"),
}


@each_of("groups, message", MISFITS)
def test_groups_that_do_not_fit_the_model_are_an_error(groups, message):
    with pytest.raises(ValueError, match=message):
        module_buckets(make_model(), groups)


def test_a_stage_buckets_its_own_parameters_of_each_group():
    whole = make_model(replace(DEBUG, n_layers=4))
    buckets = module_buckets(whole, ["tok_embeddings", "layers.0", "layers.[1-2]+layers.3", "norm+output"])
    first, last = make_model(whole.config), make_model(whole.config)
    keep_stage(first, 2, 0)
    keep_stage(last, 2, 1)

    assert buckets_of_stage(whole, buckets) == buckets
    assert buckets_of_stage(first, buckets) == (*buckets[:2], names_of(whole, "layers.1."))
    assert buckets_of_stage(last, buckets) == (
        (*names_of(whole, "layers.2."), *names_of(whole, "layers.3.")),
        buckets[3],
    )


def test_optimizer_and_state_dict_see_shards_and_the_module_whole_parameters(mesh):
    model = make_sharded(mesh, torch.bfloat16)
    weight = model.layers[0].attention.wq.weight

    assert (type(weight), weight.dtype, weight.shape) == (torch.Tensor, torch.bfloat16, (64, 64))
    assert list(model.state_dict()) == [name for name, _ in make_model().named_parameters()]
    for value in [*model.state_dict().values(), *model.parameters()]:
        assert isinstance(value, DTensor)
        assert (value.placements, value.dtype) == ((Shard(0),), torch.float32)


MANUAL = {"bucketing": "manual", "bucket_modules": ["tok_embeddings", "layers.[0-1]", "norm+output"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Backward does not need the embedding.
        pytest.param({"overlap_reorder": False, "reshard_after_forward": False}, (4, 0, 4), marks=pytest.mark.extended),
        ({"blocks_per_bucket": 2}, (3, 2, 3)),
    ],
)
def test_collectives_of_a_step(mesh, given, expected):
    assert collectives_of_a_step(mesh, **given) == expected


def orders_of_a_step(mesh, folder, **given):
    """Return the starts and waits of collectives in forward and in backward, e.g. ``g0 w0``, by order of start."""
    run_a_step(mesh, dump_graphs=str(folder), **given)
    files = sorted((folder / "rank0").iterdir())
    last_pass = files[-1].name[2:]
    return [" ".join(_starts_and_waits(file.read_text())) for file in files if file.name[2:] == last_pass]


COLLECTIVE = re.compile(r"^ +(\w+).* = torch\.ops\._c10d_functional\.(\w+)\.\w+\((\w+)", re.MULTILINE)


def _starts_and_waits(graph):
    numbers, kinds = {}, {"all_gather_into_tensor": "g", "reduce_scatter_tensor": "r", "all_reduce": "a"}
    for name, operator, first in COLLECTIVE.findall(graph):
        kind = next((short for long, short in kinds.items() if operator.startswith(long)), None)
        if kind:
            of_kind = sum(known[0] == kind for known in numbers.values())
            numbers[name] = f"{kind}{of_kind}"
            yield numbers[name]
        elif operator.startswith("wait_tensor"):
            yield f"w{numbers[first]}"


# In forward: parameters before the blocks, block 0, block 1, parameters after the blocks. In backward, the last come
# first.
REORDERED = ["g0 g1 wg0 g2 wg1 g3 wg2 wg3", "g0 g1 wg0 r0 g2 wg1 r1 wr0 wg2 r2 wr1 r3 wr2 wr3"]


@pytest.mark.parametrize(
    ("modules", "orders"),
    [
        ((), REORDERED),
        # A stage with a named module is a case of ORDERS.
        pytest.param(
            ("layers.1",),
            ["g0 wg0 g1 g2 wg1 wg2 g3 wg3", "g0 g1 wg0 r0 wr0 wg1 r1 wr1 g2 wg2 r2 wr2 r3 wr3"],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_only_buckets_of_named_modules_are_reordered_and_graphs_are_written(mesh, tmp_path, modules, orders):
    assert orders_of_a_step(mesh, tmp_path, overlap_reorder_modules=modules) == orders
    names = sorted(path.name for path in (tmp_path / "rank0").iterdir())
    assert names == ["00_annotate.txt", "01_bucket.txt", "02_reorder.txt", "03_bucket.txt", "04_reorder.txt"]
    gathers = [(tmp_path / "rank0" / name).read_text().count("all_gather_into_tensor") for name in names[:2]]
    assert gathers[0] > gathers[1] > 0


class RecordedGraph(TorchDispatchMode):
    """Runs the operators of a capture again, on the same memory, as a CUDA graph does with kernels."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **kwargs or {})
        self._calls.append((func, args, kwargs or {}, results))
        return results

    def replay(self):
        for func, args, keywords, results in self._calls:
            for kept, value in zip(tree_leaves(results), tree_leaves(func(*args, **keywords)), strict=True):
                kept.copy_(value)


def test_a_captured_step_runs_on_other_inputs_and_no_parameter_may_move(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
    parameter = torch.ones(2)
    step = CapturedStep(lambda given: [given[0] * given[1]], [parameter])
    for factor in (1.0, 2.0, 3.0):
        assert step([parameter, torch.tensor(factor)])[0].tolist() == [factor, factor]
    with pytest.raises(RuntimeError, match="a parameter has moved in memory"):
        step([torch.ones(2), torch.tensor(1.0)])


GATHERED, SUMMED = "g0 wg0 g1 wg1 g2 wg2 g3 wg3", "a0 wa0 a1 wa1 a2 wa2 a3 wa3"
REPLICAS = {"dims": ParallelDims(2, 1, 1, 1)}
# What differs from the plan -> the orders in forward and, if it is given, in backward.
ORDERS = {
    "a step in one graph gathers ahead from forward to backward": (
        {"trace": "step"},
        "g0 g1 wg0 g2 wg1 g3 wg2 g4 wg3 g5 wg4 r0 g6 wg5 r1 wr0 wg6 r2 wr1 r3 wr2 wr3",
        "",
    ),
    "gradients of a bucket are summed over replicas together": (REPLICAS, "", "a0 a1 wa0 a2 wa1 a3 wa2 wa3"),
    "replicas, a named module": (REPLICAS | {"overlap_reorder_modules": ("layers.1",)}, "", SUMMED),
    "a stage reorders the named modules that it has": (
        MANUAL | {"stage": 0, "overlap_reorder_modules": ("layers.1",)},
        "g0 wg0 g1 wg1",
        "g0 wg0 r0 wr0 r1 wr1",
    ),
    "nothing is reordered without overlap_reorder": (
        {"overlap_reorder": False},
        GATHERED,
        "g0 wg0 r0 wr0 g1 wg1 r1 wr1 g2 wg2 r2 wr2 r3 wr3",
    ),
    "the pass bucket is disabled": (
        {"disable_passes": ["bucket"]},
        " ".join(f"g{number} wg{number}" for number in range(21)),
    ),
}


# Of replicas and of a named module, CI has a case each.
NIGHTLY = "replicas, a named module"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] if name == NIGHTLY else []) for name in ORDERS]
)
def test_collectives_start_and_are_waited_for_in_the_order_of_the_settings(mesh, tmp_path, name):
    given, *orders = ORDERS[name]
    mesh = ParallelMesh(given["dims"], "cpu") if "dims" in given else mesh
    given = {key: value for key, value in given.items() if key != "dims"}
    assert orders_of_a_step(mesh, tmp_path, **given)[: len(orders)] == orders


@pytest.mark.parametrize("is_asked", [True, False])
def test_collectives_of_ungathered_parameters_are_moved_only_by_overlap_reorder(monkeypatch, is_asked):
    """Tensor parallelism without shards and replicas leaves activations, and no bucket."""
    scheduled = []
    monkeypatch.setattr(reorder, "schedule_by_time", lambda _module, bucketing, _deps: scheduled.append(bucketing))
    settings = replace(PLANNED, overlap_reorder=is_asked)

    traced = Traced(settings, ("weight",), buckets=(("weight",),))
    compile.GraphPasses(("bucket", "reorder"), traced)(torch.fx.GraphModule({}, torch.fx.Graph()).graph)

    assert scheduled == [False] * is_asked


def test_single_collectives_are_reordered_by_estimated_times(mesh, tmp_path):
    orders = [order.split() for order in orders_of_a_step(mesh, tmp_path, bucketing="none")]
    starts = [[event[0] for event in order if event[0] != "w"] for order in orders]
    assert [(kinds.count("g"), kinds.count("r")) for kinds in starts] == [(21, 0), (20, 21)]
    for order in orders:
        # In line, each collective is waited for before the next starts.
        assert max(accumulate(-1 if event[0] == "w" else 1 for event in order)) > 1


def test_no_reorder_buckets_are_those_without_a_named_module():
    model = make_model()
    buckets = block_buckets(model)
    assert no_reorder_buckets(model, buckets, ()) == ()
    assert no_reorder_buckets(model, buckets, ("tok_embeddings", "layers.[0-1]", "norm", "output")) == ()
    assert no_reorder_buckets(model, buckets, ("layers.[0-1]",)) == (buckets[0], buckets[3])
    assert no_reorder_buckets(model, buckets, ("norm", "output")) == buckets[:3]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("layers.7",), r"overlap_reorder_modules: the model has no modules \['layers.7'\]"),
        (("norm",), r"overlap_reorder_modules: \['norm'\] lack \['output.weight'\]"),
        (("layers.0.attention",), r"overlap_reorder_modules: \['layers.0.attention'\] lack \['layers.0"),
    ],
)
def test_modules_that_cover_no_whole_bucket_are_refused(modules, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        no_reorder_buckets(model, block_buckets(model), modules)


def test_auto_merges_collectives_with_shared_key_and_value_heads_and_no_gpu(mesh):
    merged = collectives_of_a_step(mesh, bucketing="auto", bucket_order="graph")

    assert all(0 < few < many for few, many in zip(merged, (21, 20, 21), strict=True)), merged


def compile_forward(mesh, buckets=None, settings=PLANNED, **extra):
    """Compile and run forward with these buckets and with ``extra`` parameters, which the model does not have."""
    model = make_sharded(mesh, config=ONE_BLOCK)
    compile_model(model, mesh, settings, buckets or block_buckets(model), **extra)
    model(torch.zeros(2, 8, dtype=torch.int64), model.config.freqs_cis(torch.arange(8)))


def test_collectives_that_are_in_no_bucket_are_an_error_that_names_their_parameters(mesh):
    with pytest.raises(Exception, match=r"collectives of \['norm.weight', 'output.weight'\] were not bucketed"):
        compile_forward(mesh, block_buckets(make_model(ONE_BLOCK))[:-1])


def test_a_parameter_that_the_model_does_not_read_is_an_error_that_names_it(mesh):
    with pytest.raises(Exception, match=r"does not read parameters \['unread'\]"):
        compile_forward(mesh, unread=nn.Parameter(torch.ones(1)))


def test_graphs_for_inductor_fix_the_order_of_collectives_by_dependencies(mesh, monkeypatch):
    """Inductor would otherwise move them again."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        # Only Inductor runs such a graph in torch 2.11.
        raise RuntimeError("the graph is kept")

    monkeypatch.setitem(compile.COMPILERS, "inductor", compile.compile_aot_eager)
    monkeypatch.setattr(compile, "boxed_nop", keep)

    with pytest.raises(Exception, match="the graph is kept"):
        compile_forward(mesh, settings=replace(PLANNED, backend="inductor"))

    (forward,) = graphs
    assert any("control_deps" in str(node.target) for node in forward.nodes)


@pytest.mark.parametrize(("bucketing", "reuses_buffers"), [("transformer_block", False), ("none", True)])
def test_inductor_reuses_no_buffer_that_a_moved_collective_may_still_use(monkeypatch, bucketing, reuses_buffers):
    patches = {}
    monkeypatch.setattr(compile, "compile_fx", lambda *_, config_patches: patches.update(config_patches))
    settings = replace(PLANNED, backend="inductor", bucketing=bucketing, overlap_reorder=not reuses_buffers)

    traced = Traced(settings)
    compile.compile_inductor(None, (), traced, {})

    fixed = {"allow_buffer_reuse", "reorder_for_compute_comm_overlap", "reorder_for_peak_memory"}
    assert {name: value for name, value in patches.items() if name in fixed} == (
        {} if reuses_buffers else dict.fromkeys(fixed, False)
    )


def gather_in_a_graph(*labels):
    """Return the graph of one all-gather in group ``shards`` of a parameter for each label; None is no label."""
    graph = torch.fx.Graph()
    for number, label in enumerate(labels):
        shard = graph.placeholder(f"shard_{number}")
        gather = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (shard, 2, "shards"))
        if label is not None:
            gather.meta[POSITION] = label
    return torch.fx.GraphModule({}, graph).graph


def test_gathers_of_other_parameters_than_the_models_are_an_error():
    check_labels(gather_in_a_graph(0, 1), {0, 1}, {"shards"})
    for labels in ((0,), (0, None), (0, 1, 2)):
        with pytest.raises(RuntimeError, match="the traced graph gathers parameters"):
            check_labels(gather_in_a_graph(*labels), {0, 1}, {"shards"})


def test_a_collective_without_a_parameter_is_an_error_before_buckets_are_made():
    traced = Traced(PLANNED, ("weight",), {0: "shards"}, buckets=(("weight",),))
    with pytest.raises(RuntimeError, match=r"collectives \['all_gather_into_tensor_default_1'\] belong to no known"):
        bucket_collectives(gather_in_a_graph(0, None), traced)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"is_sharded": True, "is_replicated": False}, "reduce-scatter"), (dict.fromkeys(REDUCTIONS, True), "all-reduce")],
)
def test_a_gradient_that_no_reduction_made_is_an_error(given, kind):
    graph = torch.fx.Graph()
    gradient = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("left"), graph.placeholder("right")))
    with pytest.raises(RuntimeError, match=f"the gradient of parameter 3 is add_tensor, which no {kind} made"):
        label_reductions(gradient, 3, **given)


def node(target, value, *arguments, **keywords):
    """Return a node that calls ``target``, with a node in place of each tensor of the arguments."""
    graph = torch.fx.Graph()

    def given(argument):
        if isinstance(argument, (list, tuple)):
            return [given(item) for item in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        placeholder = graph.placeholder("given")
        placeholder.meta["val"] = argument
        return placeholder

    made = graph.call_function(target, tuple(map(given, arguments)), keywords)
    made.meta["val"] = value
    return made


def sized(*shape):
    return torch.empty(shape, device="meta")


def test_estimates_are_of_collectives_by_bytes_and_of_operators_with_a_formula():
    gather = node(torch.ops._c10d_functional.all_gather_into_tensor.default, sized(3 * 10**8 // 4))
    assert estimate_ms(gather) == pytest.approx(1.01)
    assert estimate_ms(gather, 0) == pytest.approx(0.01)
    assert estimate_ms(node(aten.add.Tensor, sized(8), sized(8), sized(8))) is None


aten, aorta = torch.ops.aten, torch.ops.aorta
LEFT, RIGHT, PRODUCT, MM = sized(64, 32), sized(32, 16), sized(64, 16), 2 * 64 * 32 * 16
# Four query heads share two key heads, whose keys are wider than values, as in latent attention.
QUERY, KEY, VALUE = sized(2, 4, 64, 32), sized(2, 2, 64, 32), sized(2, 2, 64, 16)
ATTENDED, SUMS = sized(2, 4, 64, 16), sized(2, 4, 64)
FORWARD = 2 * 2 * 4 * 64 * 64 * (32 + 16)
BACKWARD = 2 * 2 * 4 * 64 * 64 * (3 * 32 + 2 * 16)
QKV, GRADIENT = (QUERY, KEY, VALUE), (ATTENDED, QUERY, KEY, VALUE)
ROWS, EXPERTS, ENDS = sized(96, 32), sized(4, 32, 16), torch.empty(4, dtype=torch.int32, device="meta")
IMAGE, FILTER, FILTERED = sized(2, 3, 8, 8), sized(5, 3, 3, 3), sized(2, 5, 6, 6)
CONVOLUTION = 2 * 2 * 5 * 3 * 9 * 36
SLIDE = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
# The arguments of an operator, its result, and the operations that it needs: of torch's formulas, one for products and
# one whose arguments are lists, and all of our own.
COUNTED = {
    aten.mm.default: ((LEFT, RIGHT), PRODUCT, MM),
    aten._grouped_mm.default: ((ROWS, EXPERTS, ENDS), sized(96, 16), 2 * 96 * 32 * 16),
    aorta.grouped_mm.default: ((sized(32, 96), sized(96, 16), ENDS), EXPERTS, 2 * 96 * 32 * 16),
    aorta.linear_cross_entropy.default: (
        (LEFT, sized(256, 32), sized(64), 64, 2, False, 0, ""),
        (sized(), LEFT, sized(256, 32)),
        3 * 2 * 64 * 32 * 256,
    ),
    aorta.flex_attention.default: (QKV, (ATTENDED, SUMS), FORWARD),
    aorta.flex_attention_backward.default: ((*GRADIENT, ATTENDED, SUMS), QKV, BACKWARD),
    aten.convolution.default: ((IMAGE, FILTER, None, *SLIDE), FILTERED, CONVOLUTION),
} | {
    operator: (arguments, result, flops)
    for name in ("flash_attention", "cudnn_attention")
    for suffix, arguments, result, flops in (
        ("", QKV, (ATTENDED, SUMS), FORWARD),
        ("_backward", (*GRADIENT, ATTENDED, SUMS), QKV, BACKWARD),
    )
    for operator in [getattr(aten, f"_scaled_dot_product_{name}{suffix}").default]
}


@pytest.mark.parametrize("target", COUNTED, ids=str)
def test_an_operator_is_estimated_by_the_operations_that_it_needs(target):
    arguments, result, flops = COUNTED[target]
    assert estimate_ms(node(target, result, *arguments)) == pytest.approx(0.01 + flops / 6e11, rel=1e-12)


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
def test_a_size_that_only_a_step_determines_counts_as_one():
    program = torch.export.export(Nonzero(), (torch.ones(8, 32),)).run_decompositions()
    rows = program.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [estimate_ms(row) for row in rows] == [pytest.approx(0.01 + 2 * 32 * 32 / 6e11, rel=1e-12)]


class Nonzero(nn.Module):
    """A module with a product whose number of rows depends on values."""

    def forward(self, x):
        return x[x[:, 0].nonzero().flatten()] @ torch.ones(32, 32)


def saved_graphs(*names):
    """Return the graphs of forward, with one output and then values saved for backward, and of backward."""
    values = {"tensor": torch.zeros(1), "state": torch.zeros(1), "mesh": object(), "size": torch.SymInt(2)}
    values["tangents_1"] = torch.zeros(1)
    made = []
    for inputs in (("tensor", "state", "mesh", "size"), (*names, "tangents_1")):
        graph = torch.fx.Graph()
        nodes = {name: graph.placeholder(name) for name in inputs}
        for name, node in nodes.items():
            node.meta["val"] = values[name]
        graph.output(("tensor", *names) if not made else tuple(nodes.values()))
        made.append((graph, nodes))
    forward, nodes = made[0]
    forward.output_node().args = (tuple(nodes[name] for name in ("tensor", *names)),)
    return [torch.fx.GraphModule({}, graph) for graph, _ in made]


def test_states_of_generators_are_saved_before_meshes_and_sizes_last():
    forward, backward = saved_graphs("tensor", "mesh", "state", "size")

    order_saved(forward, backward, 1)

    output = forward.graph.output_node()
    assert [node.name for node in output.args[0]] == ["tensor", "tensor", "state", "mesh", "size"]
    inputs = backward.graph.find_nodes(op="placeholder")
    assert [node.name for node in inputs] == ["tensor", "state", "size", "mesh", "tangents_1"]


def test_generators_that_torch_gives_to_backward_stay_behind_the_tangents():
    forward, backward = saved_graphs("tensor", "mesh")
    with backward.graph.inserting_after(backward.graph.find_nodes(op="placeholder")[-1]):
        generator = backward.graph.placeholder("bwd_rng_state_0")
    generator.meta["val"] = torch.Generator()

    order_saved(forward, backward, 1)

    inputs = backward.graph.find_nodes(op="placeholder")
    assert [node.name for node in inputs] == ["tensor", "mesh", "tangents_1", "bwd_rng_state_0"]


@pytest.mark.parametrize(
    "kind", ["selective", "full", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("none", "elementwise"))]
)
def test_a_traced_block_saves_no_more_than_its_checkpointing_keeps(mesh, kind):
    model = make_sharded(mesh, config=ONE_BLOCK)
    checkpoint_blocks(model, (kind,) * len(model.layers))
    compile_model(model, mesh, replace(PLANNED, bucketing="none", overlap_reorder=False))
    loss = model(torch.zeros(2, 8, dtype=torch.int64), model.config.freqs_cis(torch.arange(8))).sum()
    with profiled() as backward:
        loss.backward()
    num_attentions = sum(
        event.count
        for event in backward.key_averages()
        if event.key == "aten::_scaled_dot_product_flash_attention_for_cpu"
    )
    assert num_attentions == (model.config.n_layers if kind == "full" else 0)
