import os
import re
import sys
from pathlib import Path

import pytest

from pytest_aorta.common.errors import LaunchError
from pytest_aorta.launch import guarded as command
from pytest_aorta.launch.guarded import launch_environment, prepare_folder
from pytest_aorta.launch.launchers import Launchers
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.launch_plan import StepRecording, read_plan
from pytest_aorta.plan.workloads import CPU_KERNELS, WorkloadSpec, case_suffix, pinned_cpu_kernels
from pytest_aorta.plan.world import World
from tests.unit.builders import each_of, gpus, make_plan

ON_GPUS = World(2, "cuda", tuple(gpus(4)[2:]))
SPEC = WorkloadSpec(name="toy", folder=Path("/own/toy"), class_name="Toy", description="a toy", min_world_size=2)


@pytest.mark.parametrize(
    ("replaced", "value", "says"),
    [
        ("importlib.util.find_spec", lambda name: None, f"torch is not installed for {sys.executable}, which starts"),
        ("sys.platform", "darwin", "darwin: ranks are launched on Linux; use a container"),
    ],
)
def test_launch_is_refused_without_torch_and_without_linux(tmp_path, monkeypatch, replaced, value, says):
    monkeypatch.setattr(f"pytest_aorta.launch.guarded.{replaced}", value)
    with pytest.raises(LaunchError, match=f"^{re.escape(says)}"):
        Launchers().launch(make_plan(tmp_path))
    assert list(tmp_path.iterdir()) == []


OF_LAUNCHES = [
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
]


def test_variables_of_the_caller_are_passed_on_without_those_of_another_launch(tmp_path):
    environ = dict.fromkeys([*OF_LAUNCHES, "PATH", "NCCL_DEBUG", "PETNAME", "MY_RANK", "HTTP_PROXY"], "7")
    before = dict(environ)
    found = launch_environment(make_plan(tmp_path), environ)
    assert [name for name in before if name in found] == ["PATH", "NCCL_DEBUG", "PETNAME", "MY_RANK", "HTTP_PROXY"]
    assert environ == before


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# HIP ignores an empty value.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "", "AORTA_DEVICE": "cpu"}
AMD_GPUS = (Device("3", "MI300X", "GPU-3", "amd"), Device("GPU-1", "MI300X", "GPU-1", "amd"))


# What differs from a plan of two CPU ranks, and variables of the caller -> variables of the ranks.
OF_RANKS = {
    "GPUs": ({"world": ON_GPUS}, dict.fromkeys(VISIBLE, "0,1,2,3"), {VISIBLE[0]: "2,3", "AORTA_DEVICE": "cuda"}),
    "AMD": (
        {"world": World(2, "cuda", AMD_GPUS)},
        {VISIBLE[0]: "0", VISIBLE[1]: "0,1,2,3", VISIBLE[2]: "7,6,5,4"},
        {VISIBLE[0]: None, VISIBLE[1]: "3,GPU-1", VISIBLE[2]: "7,6,5,4"},
    ),
    "CPU": ({}, {}, HIDDEN),
    "CPU hides": ({}, dict.fromkeys(VISIBLE, "0,1"), HIDDEN),
    "threads": ({}, {}, {"OMP_NUM_THREADS": "1"}),
    "own threads": ({}, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}),
    "kernels": ({}, {"MKL_CBWR": "AVX2"}, CPU_KERNELS | {"MKL_CBWR": "AVX2"}),
    "kernels of a GPU host": ({"world": ON_GPUS}, {}, dict.fromkeys(CPU_KERNELS)),
    # The pins cost time, and bits of such a launch are not compared.
    "no bits compared": ({"record": StepRecording()}, {}, dict.fromkeys(CPU_KERNELS)),
    "bits compared": ({"record": StepRecording(hash_weights=True)}, {}, CPU_KERNELS),
    # Inductor's cache does not tell instruction sets apart.
    "cache of kernels": ({}, {"TORCHINDUCTOR_CACHE_DIR": "/c"}, {"TORCHINDUCTOR_CACHE_DIR": "/c-avx2"}),
    "cache of a launch within": ({}, {"TORCHINDUCTOR_CACHE_DIR": "/c-avx2"}, {"TORCHINDUCTOR_CACHE_DIR": "/c-avx2"}),
    "cache without pins": ({"record": StepRecording()}, {}, {"TORCHINDUCTOR_CACHE_DIR": None}),
    "deterministic": ({"record": StepRecording(deterministic=True)}, {}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
}


@each_of("changes, environ, expected", OF_RANKS)
def test_ranks_get_devices_threads_limit_and_kernels_of_the_plan(tmp_path, monkeypatch, changes, environ, expected):
    monkeypatch.setattr(command, "pinned_cpu_kernels", lambda: dict(CPU_KERNELS))
    found = launch_environment(make_plan(tmp_path, **changes), environ)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("is_compiled", [True, False])
def test_ranks_keep_the_bytecode_of_a_torch_that_was_installed_without(tmp_path, monkeypatch, is_compiled):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    if is_compiled:
        (tmp_path / "torch" / "__pycache__").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    # Other tests of this process may have imported torch.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    given = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": "/cache"}
    found = launch_environment(make_plan(tmp_path), given)
    kept = {} if is_compiled else {"PYTHONPYCACHEPREFIX": "/cache/pytest-aorta/bytecode"}
    assert {name: value for name, value in found.items() if name.startswith("PYTHON") and "PATH" not in name} == (
        kept or {"PYTHONDONTWRITEBYTECODE": "1"}
    )


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


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": SPEC, "script": None, "world": ON_GPUS},
        {"args": ("--lr", "1"), "profiler": "torch"},
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


TIMED = {
    "workload": ({"spec": SPEC}, {}, "1"),
    "switched off": ({"spec": SPEC}, {"TORCH_NCCL_ENABLE_TIMING": "0"}, "0"),
    "script": ({}, {}, "1"),
    "locates a difference": ({"record": StepRecording(hash_every_step=True)}, {}, None),
    "one rank": ({"world": World(1, "cuda", tuple(gpus(1)))}, {}, None),
}


@each_of("changes, environ, expected", TIMED)
def test_collectives_are_timed_unless_the_caller_declines(tmp_path, changes, environ, expected):
    plan = make_plan(tmp_path, **{"world": ON_GPUS} | changes)
    assert launch_environment(plan, environ).get("TORCH_NCCL_ENABLE_TIMING") == expected


def test_variables_of_the_config_name_the_case():
    suffixes = [case_suffix(variables) for variables in ({}, {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})]
    assert suffixes == ["", "[NCCL_ALGO=Ring,NCCL_PROTO=LL]"]
