"""`aorta doctor`: problems from plain facts, and the command around them."""

import os

import pytest

from pytest_aorta.cli import doctor
from pytest_aorta.cli import main as cli
from pytest_aorta.launch.leases import lease
from pytest_aorta.plan.device_kind import AMD
from tests.unit.builders import gpus, replace

TORCH = {
    "torch": "2.13.0+cu130",
    "builds": {"cuda": "13.0"},
    "problem": "",
    "device_count": 2,
    "backends": ["gloo", "nccl"],
}
AMD_GPUS = [replace(device, vendor=AMD) for device in gpus(2)]
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)"


@pytest.mark.parametrize(("free_mib", "num_gpus", "num_problems"), [(64, 2, 1), (64, 1, 0), (512, 8, 0)])
def test_shared_memory_is_judged_by_what_nccl_needs(free_mib, num_gpus, num_problems):
    assert len(list(doctor.shm_problems(free_mib * doctor.MIB, num_gpus))) == num_problems


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.9.1"}, "2.9.1 is older than 2.11"),
        ({"backends": ["nccl"]}, "torch has no gloo"),
        ({"builds": {}}, "GPUs are there and torch is built for CPU only"),
        ({"backends": ["gloo"]}, "torch has no NCCL"),
        ({"device_count": 0, "problem": OLD_DRIVER}, f"torch finds 0 GPUs, the driver 2: {OLD_DRIVER}"),
    ],
)
def test_unfit_torch_is_a_problem_with_a_remedy(changes, said):
    assert not list(doctor.torch_problems(TORCH, gpus(2)))
    [problem] = doctor.torch_problems(TORCH | changes, gpus(2))
    assert said in problem.text
    assert problem.remedy


TALKS = """
import atexit, types
atexit.register(print, "goodbye")
__version__, version = "2.13.0", types.SimpleNamespace(cuda=None)
"""


@pytest.mark.parametrize(
    ("source", "said"), [(TALKS, None), ("raise SystemExit(0)", "its process ended with 0")], ids=["talks", "exits"]
)
def test_torch_that_prints_or_exits_is_probed_to_its_end(tmp_path, source, said):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    (tmp_path / "torch/distributed.py").write_text("is_available = lambda: False")
    found = doctor.probe_torch(os.environ | {"PYTHONPATH": str(tmp_path)})
    assert found == said if said else found["torch"] == "2.13.0"


def test_host_without_shared_memory_is_judged_as_one_that_has_none(machine, capsys):
    def absent(path):
        raise FileNotFoundError(path)

    machine.setattr(os, "statvfs", absent)
    machine.setattr(doctor, "visible_devices", lambda *_: gpus(2))
    assert cli.main(["doctor"]) == 1
    assert "/dev/shm has 0 MiB free" in capsys.readouterr().out


@pytest.mark.parametrize(("build", "num_problems"), [("hip", 0), ("cuda", 1)])
def test_gpus_of_amd_need_torch_for_rocm(build, num_problems):
    assert len(list(doctor.torch_problems(TORCH | {"builds": {build: "7.0"}}, AMD_GPUS))) == num_problems


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a problem; tests break parts of it."""
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "visible_devices", lambda *_: [])
    monkeypatch.setattr(doctor, "probe_torch", lambda: TORCH)
    return monkeypatch


def test_command_ends_with_0_where_all_is_well(machine, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no problem; torch 2.13.0+cu130, built for CUDA 13.0; no GPU is visible; runs take CPU ranks")


def test_gpus_and_leased_resources_are_listed_with_their_holders(machine, capsys):
    machine.setattr(doctor, "visible_devices", lambda *_: gpus(3))
    with lease(["GPU-0", "cpu-0"], 2, exclusive=False, wait_s=0, owner="tests/test_a.py::test_x"):
        cli.main(["doctor"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("GPU", "cpu"))]
    assert [line.split()[:2] for line in lines] == [["GPU-0", "0"], ["GPU-1", "1"], ["GPU-2", "2"], ["cpu-0", "-"]]
    assert "held by tests/test_a.py::test_x (pid" in lines[0]
    assert lines[1].endswith("H200  free")


def test_command_ends_with_1_and_the_remedy_where_something_breaks_a_run(machine, capsys):
    machine.setattr(doctor, "probe_torch", lambda: "No module named 'torch'")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("PROBLEM  torch can't be imported: No module named 'torch'\n")
    assert "-> install torch as https://pytorch.org/get-started says" in out
    assert out.splitlines()[-1].startswith("1 problem; no GPU is visible")
