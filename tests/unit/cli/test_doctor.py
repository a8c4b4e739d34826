"""`aorta doctor`: each topic's findings from plain facts, and the command around them."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from pytest_aorta.cli import doctor
from pytest_aorta.cli import main as cli
from pytest_aorta.cli.doctor import MIB, NOTE, OK, PROBLEM
from pytest_aorta.launch.leases import lease, mark_bad
from pytest_aorta.plan.device_kind import AMD, NVIDIA
from tests.unit.builders import gpus, replace

TORCH = {
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "device_count": 2,
    "backends": ["gloo", "nccl"],
    "nccl": "2.28",
}
LIMITS = {"nofile": 65536, "nproc": 4096, "memlock": 8 << 20}


def states(findings) -> list[str]:
    return [finding.state for finding in findings]


def problem(findings) -> doctor.Finding:
    """Return the only problem, after checking that it has a remedy."""
    found = [finding for finding in findings if finding.state == PROBLEM]
    assert len(found) == 1
    assert found[0].remedy
    return found[0]


def test_no_gpu_is_a_note():
    assert states(doctor.device_findings([])) == [NOTE]


def test_gpus_of_two_models_are_noted():
    assert states(doctor.device_findings([*gpus(1), *gpus(1, "NVIDIA A100")])) == [OK, NOTE]


@pytest.mark.parametrize(
    ("value", "state"), [("0,1", OK), ("", OK), ("1", OK), ("0,7", PROBLEM), ("0,0", PROBLEM), ("gpu0", PROBLEM)]
)
def test_visible_devices_that_name_more_than_they_give_are_a_problem(value, state):
    assert states(doctor.variable_findings({"CUDA_VISIBLE_DEVICES": value}, NVIDIA, 2)) == [state]


def test_two_variables_of_amd_that_differ_are_a_problem():
    environ = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert "HIP goes by the former" in problem(doctor.variable_findings(environ, AMD, 2)).text
    assert PROBLEM not in states(doctor.variable_findings(environ | {"CUDA_VISIBLE_DEVICES": "0"}, AMD, 2))


def test_variables_of_amd_are_noted_on_nvidia():
    assert states(doctor.variable_findings({"ROCR_VISIBLE_DEVICES": "0"}, NVIDIA, 2)) == [OK, NOTE]


def test_variables_of_transports_are_noted_with_their_values():
    [found] = doctor.variable_findings({"NCCL_P2P_DISABLE": "1", "PATH": "x"}, NVIDIA, 2)
    assert (found.state, found.text) == (NOTE, "variables configure collectives: NCCL_P2P_DISABLE=1")


def test_ample_limits_are_well():
    assert states(doctor.limit_findings(LIMITS, 8, False)) == [OK, OK, OK]
    assert states(doctor.limit_findings(dict.fromkeys(LIMITS, resource.RLIM_INFINITY), 8, True)) == [OK, OK, OK]


@pytest.mark.parametrize(("name", "value"), [("nofile", 1024), ("nproc", 100)])
def test_low_limit_is_a_problem(name, value):
    assert name in problem(doctor.limit_findings(LIMITS | {name: value}, 8, False)).text


def test_locked_memory_counts_where_there_is_infiniband():
    assert "memlock" in problem(doctor.limit_findings(LIMITS, 8, True)).text


@pytest.mark.parametrize(
    ("free_mib", "num_gpus", "state"), [(64, 2, PROBLEM), (64, 1, NOTE), (64, 0, NOTE), (512, 8, NOTE), (4096, 8, OK)]
)
def test_shared_memory_is_judged_by_what_a_run_needs(free_mib, num_gpus, state):
    assert states(doctor.shm_findings(8192 * MIB, free_mib * MIB, num_gpus)) == [state]


def test_torch_that_can_not_be_imported_is_a_problem_with_its_last_words():
    found = problem(doctor.torch_findings("ModuleNotFoundError: No module named 'torch'", [], None))
    assert "No module named 'torch'" in found.text


def test_fitting_torch_is_well():
    assert states(doctor.torch_findings(TORCH, gpus(2), (13, 0))) == [OK, OK, OK]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.9.1"}, "2.9.1, which is older than 2.11"),
        ({"backends": ["nccl"]}, "it has no gloo"),
        ({"cuda": None}, "GPUs are there and torch is built for CPU only"),
        ({"nccl": None}, "it has no NCCL"),
        ({"device_count": 0}, "torch finds 0 GPUs, the driver 2"),
    ],
)
def test_unfit_torch_is_a_problem(changes, said):
    assert said in problem(doctor.torch_findings(TORCH | changes, gpus(2), (13, 0))).text


def test_driver_that_is_older_than_torch_is_named():
    found = problem(doctor.torch_findings(TORCH | {"device_count": 0}, gpus(2), (12, 4)))
    assert "torch is built for CUDA 13.0, the driver supports 12.4" in found.text


def test_torch_for_rocm_fits_gpus_of_amd():
    devices = [replace(device, vendor=AMD) for device in gpus(2)]
    facts = TORCH | {"cuda": None, "hip": "7.0"}
    assert states(doctor.torch_findings(facts, devices, None)) == [OK, OK, OK]
    assert "RCCL 2.28" in [finding.text for finding in doctor.torch_findings(facts, devices, None)]


@pytest.mark.parametrize(
    ("links", "expected"),
    [({}, []), ({"0": 18}, []), ({"0": 18, "1": 18}, [OK]), ({"0": 0, "1": 0}, [NOTE]), ({"0": 18, "1": 17}, [NOTE])],
)
def test_links_are_reported_where_there_are_two_gpus(links, expected):
    assert states(doctor.link_findings(links)) == expected


def test_port_can_be_had_here():
    assert doctor.port_findings()[0].state == OK


def test_bad_marks_and_holders_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    assert states(doctor.lease_findings()) == [OK]
    mark_bad("GPU-1", "it fell off the bus")
    with lease(("GPU-0",), 1, exclusive=False, wait_s=1, owner="a test"):
        bad, held = doctor.lease_findings()
    assert (bad.state, bad.remedy) == (PROBLEM, "aorta devices clear-bad GPU-1, once it works")
    assert (held.state, "held by a test" in held.text) == (NOTE, True)


def test_lease_folder_that_can_not_be_used_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "leases").mkdir(mode=0o755)
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    assert "not by user" in problem(doctor.lease_findings()).text


def test_folder_below_a_file_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = doctor.folder_findings({"results": tmp_path / "new" / "folder", "baselines": tmp_path / "file" / "x"})
    assert found[0].state in (OK, NOTE)
    assert "can't be written" in problem(found).text
    assert not (tmp_path / "new").exists()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without a problem; tests break parts of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AORTA_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "visible_devices", lambda *_: [])
    monkeypatch.setattr(doctor, "probe_torch", lambda: TORCH)
    monkeypatch.setattr(doctor, "read_limits", lambda: LIMITS)
    return monkeypatch


def test_amd_variables_are_no_mistake_where_they_hide_every_gpu_or_there_is_none(machine, capsys):
    machine.setenv("HIP_VISIBLE_DEVICES", "-1")
    cli.main(["doctor"])
    assert "mean nothing" not in capsys.readouterr().out
    machine.setattr(
        doctor,
        "visible_devices",
        lambda *environ: [replace(gpu, vendor=AMD) for gpu in gpus(2)] if environ else [],
    )
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "names 1 and gives 0 of 2 GPUs" in out
    assert "mean nothing" not in out


def test_command_ends_with_0_where_all_is_well(machine, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "nothing here would break a run"
    assert "2.13.0+cu130, built for CUDA 13.0" in out


def test_command_ends_with_1_and_the_remedy_where_something_breaks_a_run(machine, capsys):
    machine.setattr(doctor, "probe_torch", lambda: "No module named 'torch'")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "torch          PROBLEM  can't be imported: No module named 'torch'" in out
    assert "-> install torch as https://pytorch.org/get-started says" in out
    assert out.splitlines()[-1] == "1 problem would break a run"


def test_command_gives_json(machine, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {finding["topic"] for finding in found} >= {
        "devices",
        "torch",
        "ports",
        "shared memory",
        "leases",
        "folders",
    }
    assert set(found[0]) == {"topic", "state", "text", "remedy"}
    assert not Path("results").exists()
