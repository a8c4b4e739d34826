"""`aorta doctor`: problems from plain facts, and the command around them."""

import os

import pytest

from pytest_aorta.cli import doctor
from pytest_aorta.cli import main as cli
from pytest_aorta.launch.leases import lease

NAMES = ("GPU-0", "GPU-1", "GPU-2")


@pytest.mark.parametrize(("free_mib", "num_gpus", "num_problems"), [(64, 2, 1), (64, 1, 0), (512, 8, 0)])
def test_shared_memory_is_judged_by_what_nccl_needs(free_mib, num_gpus, num_problems):
    assert len(list(doctor.shm_problems(free_mib * doctor.MIB, num_gpus))) == num_problems


def test_host_without_shared_memory_is_judged_as_one_that_has_none(machine, nvml, capsys):
    def absent(path):
        raise FileNotFoundError(path)

    machine.setattr(os, "statvfs", absent)
    nvml.names = NAMES[:2]
    assert cli.main(["doctor"]) == 1
    assert "/dev/shm has 0 MiB free" in capsys.readouterr().out


TORCH = """
from types import SimpleNamespace
print("hello")
__version__, cuda = "2.13.0", SimpleNamespace(device_count=lambda: 0)
"""


def write_torch(folder):
    """Write a package of a torch without GPUs, and of its facts."""
    facts = folder / "torch" / "utils"
    facts.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (facts / "collect_env.py").write_text("get_pretty_env_info = lambda: 'Nvidia driver: none'")


@pytest.fixture
def machine(nvml, monkeypatch, tmp_path):
    """A machine without a problem; tests break parts of it."""
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    nvml.names = ()
    write_torch(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return monkeypatch


def test_command_ends_with_0_where_all_is_well(machine, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no problem; torch 2.13.0; no GPU is visible; runs take CPU ranks")
    assert out.endswith("\nNvidia driver: none\n")


def test_gpus_and_leased_resources_are_listed_with_their_holders(machine, nvml, capsys):
    nvml.names = NAMES[:3]
    with lease(["GPU-0", "cpu-0"], 2, exclusive=False, wait_s=0, owner="tests/test_a.py::test_x"):
        cli.main(["doctor"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("GPU", "cpu"))]
    assert [line.split()[:2] for line in lines] == [["GPU-0", "0"], ["GPU-1", "1"], ["GPU-2", "2"], ["cpu-0", "-"]]
    assert "held by tests/test_a.py::test_x (pid" in lines[0]
    assert lines[1].endswith(" free")


def test_gpus_that_torch_does_not_find_are_a_problem_with_a_remedy(machine, nvml, capsys):
    nvml.names = NAMES[:1]
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("PROBLEM  torch 2.13.0 finds 0 GPUs, the driver 1\n")
    assert "-> install torch as https://pytorch.org/get-started says" in out


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise SystemExit(0)", "its process ended with 0"), ("raise ImportError('no libc')", "ImportError: no libc")],
)
def test_torch_that_can_not_be_imported_is_a_problem_with_a_remedy(machine, tmp_path, capsys, source, said):
    (tmp_path / "torch" / "__init__.py").write_text(source)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"PROBLEM  torch can't be imported: {said}\n")
    assert "-> install torch as https://pytorch.org/get-started says" in out
    assert out.splitlines()[-1].startswith("1 problem; no GPU is visible")
