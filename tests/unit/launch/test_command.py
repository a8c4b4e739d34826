from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.common.errors import LaunchError
from pytest_aorta.launch import guarded as command
from pytest_aorta.launch.guarded import agent_command, launch_environment, prepare_folder
from pytest_aorta.launch.warm import ForkServers
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.launch_plan import read_plan
from pytest_aorta.plan.profiler import ProfilerSchedule
from pytest_aorta.plan.workloads import CPU_KERNELS, WorkloadSpec, case_suffix, pinned_cpu_kernels
from pytest_aorta.plan.world import World
from tests.unit.builders import gpus, make_plan

ON_GPUS = World(2, "cuda", tuple(gpus(4)[2:]))
SPEC = WorkloadSpec(name="toy", folder=Path("/own/toy"), class_name="Toy", description="a toy", min_world_size=2)


def test_launch_without_torch_is_refused_with_the_interpreter_that_lacks_it(tmp_path, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=f"^torch is not installed for {re.escape(sys.executable)}, which starts"):
        ForkServers().launch(make_plan(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "PET_NNODES",
        "PET_RDZV_ENDPOINT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ],
)
def test_variable_of_another_launch_is_not_passed_on(tmp_path, name):
    assert name not in launch_environment(make_plan(tmp_path), {name: "7"})


@pytest.mark.parametrize("name", ["PATH", "NCCL_DEBUG", "PETNAME", "MY_RANK", "HTTP_PROXY"])
def test_other_variables_of_the_caller_are_passed_on(tmp_path, name):
    assert launch_environment(make_plan(tmp_path), {name: "7"})[name] == "7"


def test_planned_devices_are_visible_to_ranks_in_their_order(tmp_path):
    environment = launch_environment(make_plan(tmp_path, world=ON_GPUS), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["AORTA_DEVICE"] == "cuda"


def test_planned_amd_devices_are_visible_among_those_that_rocr_leaves(tmp_path):
    world = World(2, "cuda", (Device("3", "MI300X", "GPU-3", "amd"), Device("GPU-1", "MI300X", "GPU-1", "amd")))
    environ = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "7,6,5,4"}
    environment = launch_environment(make_plan(tmp_path, world=world), environ)
    seen = {name: value for name, value in environment.items() if name.endswith("VISIBLE_DEVICES")}
    assert seen == {"HIP_VISIBLE_DEVICES": "3,GPU-1", "ROCR_VISIBLE_DEVICES": "7,6,5,4"}


@pytest.mark.parametrize("value", [None, "0,1"])
def test_no_device_is_visible_to_cpu_ranks(tmp_path, value):
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    environment = launch_environment(make_plan(tmp_path), {} if value is None else dict.fromkeys(names, value))
    # HIP ignores an empty value.
    assert [environment[name] for name in names] == ["", "-1", ""]
    assert environment["AORTA_DEVICE"] == "cpu"


def test_number_of_threads_is_one_unless_the_caller_sets_it(tmp_path):
    assert launch_environment(make_plan(tmp_path), {})["OMP_NUM_THREADS"] == "1"
    assert launch_environment(make_plan(tmp_path), {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_cpu_ranks_run_the_kernels_of_one_code_path_unless_the_caller_chooses(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "pinned_cpu_kernels", lambda: dict(CPU_KERNELS))
    environment = launch_environment(make_plan(tmp_path), {"MKL_CBWR": "AVX2"})
    chosen = {name: environment[name] for name in CPU_KERNELS}
    assert chosen == {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_host_of_gpu_ranks_chooses_its_own_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "pinned_cpu_kernels", lambda: dict(CPU_KERNELS))
    assert CPU_KERNELS.keys().isdisjoint(launch_environment(make_plan(tmp_path, world=ON_GPUS), {}))


@pytest.mark.parametrize(
    ("cpuinfo", "is_pinned"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse4_1 avx2 fma\n", True),
        # Without AVX2, ATen's AVX2 kernels would be an illegal instruction.
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu sse4_1 avx\n", False),
        ("Features\t: fp asimd\n", False),
        (None, False),
    ],
)
def test_kernels_are_pinned_only_on_a_cpu_that_has_them(tmp_path, cpuinfo, is_pinned):
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert pinned_cpu_kernels(file) == (CPU_KERNELS if is_pinned else {})


def test_collectives_time_out_before_the_launch(tmp_path):
    environment = launch_environment(make_plan(tmp_path, timeout_s=100.0), {})
    assert float(environment["AORTA_COLLECTIVE_TIMEOUT_S"]) == 80.0


def test_ranks_import_the_same_code_as_pytest(tmp_path):
    import pytest_aorta

    parent = Path(pytest_aorta.__file__).parents[1]
    path = launch_environment(make_plan(tmp_path), {"PYTHONPATH": "/mine"})["PYTHONPATH"]
    if parent.name in ("site-packages", "dist-packages"):
        assert path == "/mine"
    else:
        assert path == f"{parent}:/mine"


def test_callers_environment_is_not_changed(tmp_path):
    environ = {"RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}
    launch_environment(make_plan(tmp_path), environ)
    assert environ == {"RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}


def test_agent_starts_one_rank_per_device_with_its_own_rendezvous(tmp_path):
    command = agent_command(make_plan(tmp_path, world=World(3, "cpu")))
    assert command == [
        sys.executable,
        "-m",
        "pytest_aorta.launch.process.torchrun",
        str(tmp_path),
        "--nnodes=1",
        "--node-rank=0",
        "--nproc-per-node=3",
        f"--log-dir={tmp_path}/torchelastic",
        "-m",
        "pytest_aorta.launch.process.rank",
        str(tmp_path),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": SPEC, "script": None, "world": ON_GPUS},
        {"args": ("--lr", "1"), "profiler": "torch", "profiler_schedule": ProfilerSchedule.parse("wait=2 memory")},
        {"cwd": Path(os.fsdecode(b"/not-utf-8-\xff"))},
    ],
)
def test_ranks_read_the_plan_that_pytest_has_written(tmp_path, changes):
    plan = make_plan(tmp_path, **changes)
    prepare_folder(plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_variables_of_the_config_are_set_for_ranks_and_hidden_from_the_workload(tmp_path):
    given = {"NCCL_ALGO": "Ring", "TORCH_NCCL_ENABLE_TIMING": "0"}
    plan = make_plan(tmp_path, world=ON_GPUS, config={"steps": 5, "environment": given})
    environment = launch_environment(plan, {"NCCL_ALGO": "Tree"})
    assert {name: environment[name] for name in given} == given
    assert plan.own_config == {"steps": 5}


@pytest.mark.parametrize(
    ("changes", "environ", "expected"),
    [
        ({"spec": SPEC}, {}, "1"),
        ({"spec": SPEC}, {"TORCH_NCCL_ENABLE_TIMING": "0"}, "0"),
        ({"spec": replace(SPEC, collective_timing=False)}, {}, None),
        ({"spec": replace(SPEC, collective_timing=False)}, {"TORCH_NCCL_ENABLE_TIMING": "1"}, "1"),
        ({}, {}, "1"),
        ({"world": World(1, "cuda", tuple(gpus(1)))}, {}, None),
    ],
    ids=["workload", "switched off", "declined", "declined, caller asks", "script", "one rank"],
)
def test_collectives_of_several_ranks_are_timed_unless_the_workload_or_the_caller_declines(
    tmp_path, changes, environ, expected
):
    plan = make_plan(tmp_path, **{"world": ON_GPUS} | changes)
    assert launch_environment(plan, environ).get("TORCH_NCCL_ENABLE_TIMING") == expected


def test_variables_of_the_config_name_the_case():
    assert case_suffix({}) == ""
    assert case_suffix({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}) == "[NCCL_ALGO=Ring,NCCL_PROTO=LL]"
