import os

import pytest

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.world import MAX_CPU_RANKS_PER_CORE, World, WorldSpec, resolve_world
from tests.unit.builders import gpus, make_options

ON_CPU = World(2, "cpu")
ON_GPUS = World(2, "cuda", tuple(gpus(2)))


@pytest.mark.parametrize(
    ("spec", "options", "visible", "expected"),
    [
        (WorldSpec(2, "any"), {}, 4, ON_GPUS),
        (WorldSpec(2, "any"), {"gpus": 2}, 4, ON_GPUS),
        (WorldSpec(2, "any"), {"gpus": 0}, 4, ON_CPU),
        (WorldSpec(2, "any"), {"without_gpus": "fail"}, 4, ON_GPUS),
        (WorldSpec(2, "any"), {}, 0, ON_CPU),
        (WorldSpec(2, "any"), {"gpus": 0}, 0, ON_CPU),
        (WorldSpec(2, "cuda"), {}, 4, ON_GPUS),
        (WorldSpec(2, "cpu"), {}, 4, ON_CPU),
        (WorldSpec(2, "cpu"), {"gpus": 4}, 4, ON_CPU),
        (WorldSpec(2, "cpu"), {"without_gpus": "fail"}, 4, ON_CPU),
        (WorldSpec("all", "any"), {}, 4, World(4, "cuda", tuple(gpus(4)))),
        (WorldSpec("all", "any"), {"gpus": 3}, 4, World(3, "cuda", tuple(gpus(3)))),
        (WorldSpec("all", "any"), {}, 0, ON_CPU),
        (WorldSpec(4, nodes=2), {"nnodes": 2}, 8, World(4, "cuda", tuple(gpus(2)), 2)),
        (WorldSpec("all", nodes=2), {"nnodes": 2}, 8, World(16, "cuda", tuple(gpus(8)), 2)),
        (WorldSpec("all", nodes=2), {"nnodes": 2, "gpus": 0}, 0, World(4, "cpu", nodes=2)),
        (WorldSpec(2, nodes=2), {"nnodes": 4}, 0, World(2, "cpu", nodes=2)),
        (WorldSpec(2), {"nnodes": 4}, 0, ON_CPU),
    ],
)
def test_world_has_the_devices_that_marker_and_options_ask_for(spec, options, visible, expected):
    assert resolve_world(spec, make_options(**options), gpus(visible)) == expected


@pytest.mark.parametrize(
    ("size", "device", "options", "visible", "message"),
    [
        (8, "any", {"nnodes": 2}, 2, "needs 4 GPUs on each node, 2 given"),
        (8, "cuda", {}, 4, "needs 8 GPUs, 4 given"),
        (8, "any", {}, 4, "needs 8 GPUs, 4 given"),
        (4, "cuda", {"gpus": 2}, 4, "needs 4 GPUs, 2 given (--aorta-gpus=2)"),
        (2, "cuda", {"gpus": 0}, 4, "needs 2 GPUs, 0 given (--aorta-gpus=0)"),
        (2, "cuda", {}, 0, "needs 2 GPUs, 0 given"),
        (1, "cuda", {}, 0, "needs 1 GPU, 0 given"),
        ("all", "cuda", {}, 0, "needs at least 1 GPU, 0 given"),
        (2, "any", {"without_gpus": "fail"}, 0, "needs GPUs, 0 given; CPU ranks are not allowed instead"),
    ],
)
def test_lacking_devices_are_reported_with_needed_and_given(size, device, options, visible, message):
    with pytest.raises(DevicesUnavailable) as caught:
        resolve_world(WorldSpec(size, device, nodes=options.get("nnodes", 1)), make_options(**options), gpus(visible))
    assert message in str(caught.value)


@pytest.mark.parametrize("whole", [World(4, "cuda", tuple(gpus(4))), World(4, "cpu")])
def test_first_ranks_of_a_world_have_its_first_devices(whole):
    assert whole.first(2) == (ON_GPUS if whole.devices else ON_CPU)
    assert whole.first(4) == whole


def test_more_cpu_ranks_than_make_sense_are_refused():
    limit = MAX_CPU_RANKS_PER_CORE * os.cpu_count()
    assert resolve_world(WorldSpec(limit, "cpu"), make_options(), []).size == limit
    with pytest.raises(DevicesUnavailable, match=f"needs {limit + 1} ranks; .* take at most {limit}"):
        resolve_world(WorldSpec(limit + 1, "cpu"), make_options(), [])


@pytest.mark.parametrize(
    ("world", "platform"),
    [
        (World(2, "cpu"), "cpu-x2-gloo"),
        (ON_GPUS, "nvidia-h200-x2-nccl"),
        (World(4, "cuda", tuple(gpus(2)), 2), "nvidia-h200-x4-n2-nccl"),
        (World(1, "cuda", tuple(gpus(1, "AMD Instinct MI300X / OAM"))), "amd-instinct-mi300x-oam-x1-nccl"),
        (World(2, "cuda", (Device("0", "B", "GPU-0"), Device("1", "A", "GPU-1"))), "a+b-x2-nccl"),
    ],
)
def test_platform_names_model_count_and_backend(world, platform):
    assert world.platform == platform


# The world of each test of a run for 8 GPUs, by the GPUs that are visible; None: the test lacks GPUs.
ON_EIGHT = World(8, "cuda", tuple(gpus(8)))
FOR_EIGHT = {
    WorldSpec(2): {0: None, 2: ON_GPUS, 8: ON_GPUS},
    WorldSpec(8): {0: None, 2: None, 8: ON_EIGHT},
    WorldSpec(8, "cuda"): {0: None, 2: None, 8: ON_EIGHT},
    WorldSpec("all"): {0: None, 2: None, 8: ON_EIGHT},
    WorldSpec(16): {0: None, 2: None, 8: None},
    WorldSpec(8, simulated=()): {0: None, 2: None, 8: ON_EIGHT},
    WorldSpec(2, "cpu"): {0: ON_CPU, 2: ON_CPU, 8: ON_CPU},
}


@pytest.mark.parametrize("spec", FOR_EIGHT, ids=lambda spec: f"{spec.size}-{spec.device}")
def test_one_command_for_eight_gpus_runs_what_fits_and_simulates_the_rest(spec):
    for visible, world in FOR_EIGHT[spec].items():
        simulate, *others = (make_options(gpus=8, without_gpus=mode) for mode in ("simulate", "skip", "fail"))
        size = 8 if spec.size == "all" else spec.size
        if spec.simulated is None:
            assert resolve_world(spec, simulate, gpus(visible)) == (world or World(size, "cpu", simulated=(0,)))
        for options in (*others, *([simulate] if spec.simulated is not None else [])):
            if world is None:
                with pytest.raises(DevicesUnavailable, match=rf"^needs {size} GPUs, {visible} (visible|given) \("):
                    resolve_world(spec, options, gpus(visible))
            else:
                assert resolve_world(spec, options, gpus(visible)) == world


def test_gpus_that_are_missing_are_reported_with_the_variables_that_hide_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DevicesUnavailable, match=r"1 visible \(--aorta-gpus=4, CUDA_VISIBLE_DEVICES='3'"):
        resolve_world(WorldSpec(2), make_options(gpus=4), gpus(1))


def test_nodes_need_a_run_that_has_them():
    with pytest.raises(DevicesUnavailable, match=r"needs 2 nodes, 1 given \(--aorta-nnodes=1\)"):
        resolve_world(WorldSpec(2, nodes=2), make_options(), [])
