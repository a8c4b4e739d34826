"""A rank of a simulated world against real ranks: the same costs, without peers."""

from functools import cache

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.result.reading import collect_result
from tests.unit.builders import make_plan, nightly

STEPS = {"steps": 1, "warmup": 1, "profile_steps": 0, "n_layers": 1}
NAMES = ["llama_fsdp2", nightly("llama_simple_fsdp")]


def compared(result):
    """Return what a simulated rank has in common with a real one, for each rank."""
    return [
        ([(row.kind, row.calls, row.group_size, row.dtype, row.bytes) for row in costs.collectives], costs.flops)
        for costs in result.costs
    ]


@pytest.fixture(scope="module")
def real_ranks(servers, tmp_path_factory, pytestconfig):
    """A function that launches two real ranks, once, and returns what they have in common with simulated ones."""

    @cache
    def found(name):
        spec = find_workload(name, [])
        plan = make_plan(
            tmp_path_factory.mktemp("real") / "run",
            name=name,
            spec=spec,
            config=resolve_config(spec, STEPS),
            script=None,
            cwd=pytestconfig.rootpath,
            launcher=LauncherKind.FORKSERVER,
        )
        costs = compared(collect_result(plan, servers.launch(plan)))
        assert len(costs) == 2
        assert all(collectives and flops for collectives, flops in costs)
        return costs

    return found


@pytest.mark.world(size=2, simulated=(0, 1), warm=True)
@pytest.mark.parametrize("name", NAMES)
def test_simulated_ranks_have_the_collectives_bytes_and_operations_of_real_ones(workload, real_ranks, name):
    simulated = workload.run(name, **STEPS)
    assert compared(simulated) == real_ranks(name)
    assert (simulated.platform, simulated.loss, simulated.weight_hashes) == ("simulated-x2", [], {})
    assert simulated.metrics["peak_memory_bytes"] > 0


@pytest.mark.world(size=8, simulated=True, warm=True)
def test_memory_of_a_traced_model_does_not_contain_its_graphs(workload):
    wide = STEPS | {"dim": 1024, "ffn_hidden": 4096, "param_dtype": "bfloat16"}
    eager, traced = (
        workload.run(name, **wide).metrics["peak_memory_bytes"] for name in ("llama_fsdp2", "llama_simple_fsdp")
    )
    assert traced < 1.3 * eager


@pytest.mark.world(size=1024, simulated=(0, 512), warm=True)
def test_parameters_with_fewer_rows_than_ranks_are_padded_at_1024_ranks(workload, real_ranks):
    result = workload.run("llama_fsdp2", **STEPS)
    first, other = result.costs
    assert first.collectives == other.collectives
    two = {(kind, dtype): num_bytes for kind, _, _, dtype, num_bytes in real_ranks("llama_fsdp2")[0][0]}
    for row in first.collectives:
        assert row.group_size == 1024
        if row.kind != "all_reduce":  # of the gradients' norm
            assert row.bytes > 3 * two[str(row.kind), row.dtype]
    assert "layers.0.attention.wq.weight" in str(result.environment["padded_parameters"])


@pytest.mark.world(size=16, simulated=(15,), warm=True)
def test_a_rank_that_fails_is_named_by_its_number(workload):
    with pytest.raises(LaunchError) as caught:
        workload.run("llama_fsdp2", tensor_parallel_degree=3, **STEPS)
    assert "rank 15" in str(caught.value)
    assert "16 simulated ranks" in str(caught.value)


# Rows that all ranks divide. Of others, DTensors pad the part of each rank, which takes a compiler minutes.
WIDE = STEPS | {"n_layers": 2, "dim": 1024, "n_kv_heads": 4, "ffn_hidden": 1024, "vocab_size": 1024}
LAYOUTS = {
    "replicas and tensor parallelism": (
        {"data_parallel_replicate_degree": 4, "tensor_parallel_degree": 2, "activation_checkpointing": "full"},
        {("all_gather", 2), ("reduce_scatter", 2), ("all_gather", 128), ("reduce_scatter", 128), ("all_reduce", 4)},
    ),
    "stages and experts": (
        {"pipeline_parallel_degree": 2, "gradient_accumulation": 2, "num_experts": 8, "expert_parallel_degree": 8},
        {("all_to_all", 8), ("all_gather", 64), ("reduce_scatter", 64), ("all_gather", 512), ("reduce_scatter", 512)},
    ),
}


@pytest.mark.world(size=1024, simulated=(0, 512), warm=True)
@pytest.mark.parametrize("layout", [nightly("replicas and tensor parallelism"), "stages and experts"])
@pytest.mark.parametrize("name", NAMES)
def test_1024_ranks_of_each_layout_have_its_groups(workload, name, layout):
    config, groups = LAYOUTS[layout]
    result = workload.run(name, **WIDE, **config)
    for costs in result.costs:
        assert groups <= {(row.kind, row.group_size) for row in costs.collectives}
        assert costs.flops
    if "pipeline_parallel_degree" in config:  # the first stage sends activations, the last one computes logits
        assert all("send_recv" in {row.kind for row in costs.collectives} for costs in result.costs)
        assert result.costs[0].flops != result.costs[1].flops
    else:
        assert result.costs[0].flops == result.costs[1].flops


# Its model is gone when the script ends, as where all of it is in a function.
SPLIT = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

def main():
    dist.init_process_group("gloo")
    data = list(torch.randn(96, 4))
    model = fully_shard(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(data, batch_size=int(os.environ.get("NCCL_BATCH", 2)), sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""


def test_scale_prints_what_has_finished_when_more_ranks_have_too_few_steps(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SPLIT)
    monkeypatch.chdir(tmp_path)
    assert main(["scale", "--sizes", "2,8,16", "train.py"]) == 1
    printed, error = capsys.readouterr()
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["ranks", "2", "8"]
    assert "2 -> 8 ranks: 24 steps -> 6: the data are split" in printed
    assert "padding of parameters with fewer rows than ranks: weight, bias" in printed
    assert "train.py on 16 simulated ranks" in error


def test_scale_prints_a_table_of_each_side(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SPLIT)
    monkeypatch.chdir(tmp_path)
    assert main(["scale", "--sizes", "2,4", "--ab", "env:NCCL_BATCH=4", "train.py"]) == 0
    here, there = capsys.readouterr().out.split("at env:NCCL_BATCH=4: NCCL_BATCH 4 -> unset\n")
    rows = [[line.split() for line in table.splitlines()[:3]] for table in (here, there)]
    assert [[row[0] for row in table] for table in rows] == [["ranks", "2", "4"]] * 2
    flops = [[int(row[5].replace(",", "")) for row in table[1:]] for table in rows]
    assert flops[1] == [2 * count for count in flops[0]]
    assert main(["scale", "--ab", "python:/absent", "train.py"]) == 2
    assert "--aorta-ab=python:/absent: there is no program /absent" in capsys.readouterr().err
