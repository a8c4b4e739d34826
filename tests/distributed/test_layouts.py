"""Every cell of the table in docs/parallelism.md: `llama_simple_fsdp` against `llama_fsdp2`, in each layout."""

from collections import Counter

import pytest
from aorta_workloads.distributed.fsdp2 import HAS_PARAMETER_MESHES

from pytest_aorta import ComparisonFailed
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.rank_files import read_arrivals

from .layouts import COLLECTIVES, COLUMNS, LAYOUTS, REFERENCE, TRAINING

pytestmark = [pytest.mark.numerics, pytest.mark.launch_timeout(300)]


CI_COLUMN = "aot_eager, transformer_block"
CI_STEPS = 4
# Their collectives are those of the table.
COUNTED = (CI_COLUMN, "aot_eager, step")


def rows():
    """Return each row with its columns and steps: all of them every night, and in CI one column of a few rows."""
    for layout in LAYOUTS:
        world = pytest.mark.world(size=layout.world_size, device="cpu", warm=True)
        if layout.in_ci:
            yield pytest.param(layout, [CI_COLUMN], CI_STEPS, id=f"{layout.name}, {CI_COLUMN}", marks=world)
        declared = [column for column in COLUMNS if layout.difference(column) is not None]
        yield pytest.param(layout, declared, TRAINING["steps"], id=layout.name, marks=[world, pytest.mark.extended])


@pytest.mark.parametrize(("layout", "columns", "steps"), list(rows()))
def test_each_backend_does_what_the_table_says(workload, distributed_world, layout, columns, steps):
    training = TRAINING | {"steps": steps}
    eager = workload.run(REFERENCE, **training | layout.reference)
    expected = COLLECTIVES[layout.name]
    # A pipeline of torch 2.11 gathers once more, as experts are units of their own there.
    own = REFERENCE if HAS_PARAMETER_MESHES else f"{REFERENCE}, experts apart"
    assert collectives_of_a_step(distributed_world, eager) == expected.get(own, expected[REFERENCE])
    for column in columns:
        # FSDP2's default; the eager backend has no graph in which a gather could be repeated.
        reshard = {"reshard_after_forward": column != "eager"}
        traced = workload.run("llama_simple_fsdp", **training | reshard | dict(layout.config) | COLUMNS[column])
        if column in COUNTED:
            found = collectives_of_a_step(distributed_world, traced)
            assert found == expected["llama_simple_fsdp"]
        if layout.difference(column):
            with pytest.raises(ComparisonFailed) as found:
                workload.compare(traced, eager, steps=steps, metrics=["weight_hash"], label=column)
            assert set(found.value.metrics) == {"weight_hash"}
            assert "first difference: step 1, " in str(found.value)
        else:
            workload.compare(traced, eager, steps=steps, label=column)


def collectives_of_a_step(world, result):
    """Return the collectives of rank 0 in the last step, by process group and kind.

    Gloo scatters sums by an all-reduce.
    """
    launch = world.launcher.find(result)
    arrivals = read_arrivals(launch.plan.run_dir / "ranks" / "0" / ARRIVALS_FILE)
    began_ns, ended_ns = arrivals.began_ns[-1], arrivals.ended_ns[-1]
    names = [name for name, moment in arrivals.arrived_ns.items() if began_ns <= moment <= ended_ns]
    found = Counter(map(_group_and_kind, names))
    groups = {
        group: [f"{kind} {found[group, kind]}" for of, kind in sorted(found) if of == group] for group, _ in found
    }
    return "; ".join(f"{group}: {', '.join(groups[group])}" for group in sorted(groups, key=_outermost_first))


def _outermost_first(group):
    """Return the place of a group in the mesh; flattened dimensions come last."""
    order = ("world", "pp", "dp_replicate", "fsdp", "expert_fsdp", "cp", "ep", "tp", group)
    return order.index(group), group


def _group_and_kind(name):
    group, _, call = name.split("/")
    description = group.partition(" ")[2].removeprefix("mesh_")
    return "world" if description == "default_pg" else description, call.removeprefix("gloo:").replace("_", "-")
