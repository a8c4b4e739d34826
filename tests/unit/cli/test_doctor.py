"""`aorta doctor`: each topic's findings from plain facts, and the command around them."""

import pynvml
import pytest

from pytest_aorta.cli import doctor
from pytest_aorta.cli import main as cli
from pytest_aorta.cli.doctor import MIB, NOTE, OK, PROBLEM
from pytest_aorta.plan.device_kind import AMD
from tests.unit.builders import gpus, replace

TORCH = {
    "torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "device_count": 2, "backends": ["gloo", "nccl"],
    "nccl": "2.28",
}  # fmt: skip


def states(findings) -> list[str]:
    return [finding.state for finding in findings]


def problem(findings) -> doctor.Finding:
    """Return the only problem, after checking that it has a remedy."""
    found = [finding for finding in findings if finding.state == PROBLEM]
    assert len(found) == 1
    assert found[0].remedy
    return found[0]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([], [NOTE]), ([*gpus(1), *gpus(1, "NVIDIA A100")], [OK, NOTE])],
    ids=["none", "two models"],
)
def test_no_gpu_and_gpus_of_two_models_are_noted(devices, expected):
    assert states(doctor.device_findings(devices)) == expected


@pytest.mark.parametrize(("version", "expected"), [(13000, (13, 0)), (12040, (12, 4)), (None, None)])
def test_version_of_cuda_comes_from_the_driver(monkeypatch, version, expected):
    def asked():
        if version is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return version

    ended = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: ended.append(True))
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", asked)
    assert doctor.newest_cuda() == expected
    assert ended == [True]


@pytest.mark.parametrize(
    ("free_mib", "num_gpus", "state"), [(64, 2, PROBLEM), (64, 1, NOTE), (64, 0, NOTE), (512, 8, NOTE), (4096, 8, OK)]
)
def test_shared_memory_is_judged_by_what_a_run_needs(free_mib, num_gpus, state):
    assert states(doctor.shm_findings(8192 * MIB, free_mib * MIB, num_gpus)) == [state]


@pytest.mark.parametrize(
    ("changes", "driver", "said"),
    [
        ({"torch": "2.9.1"}, (13, 0), "2.9.1, which is older than 2.11"),
        ({"backends": ["nccl"]}, (13, 0), "it has no gloo"),
        ({"cuda": None}, (13, 0), "GPUs are there and torch is built for CPU only"),
        ({"nccl": None}, (13, 0), "it has no NCCL"),
        ({"device_count": 0}, (13, 0), "torch finds 0 GPUs, the driver 2"),
        ({"device_count": 0}, (12, 4), "torch is built for CUDA 13.0, the driver supports 12.4"),
    ],
)
def test_unfit_torch_is_a_problem(changes, driver, said):
    assert states(doctor.torch_findings(TORCH, gpus(2), (13, 0))) == [OK, OK, OK]
    assert said in problem(doctor.torch_findings(TORCH | changes, gpus(2), driver)).text


def test_torch_for_rocm_fits_gpus_of_amd():
    devices = [replace(device, vendor=AMD) for device in gpus(2)]
    found = list(doctor.torch_findings(TORCH | {"cuda": None, "hip": "7.0"}, devices, None))
    assert states(found) == [OK, OK, OK]
    assert "RCCL 2.28" in [finding.text for finding in found]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without a problem; tests break parts of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "visible_devices", lambda *_: [])
    monkeypatch.setattr(doctor, "probe_torch", lambda: TORCH)
    return monkeypatch


def test_command_ends_with_0_where_all_is_well(machine, capsys):
    assert cli.main(["doctor"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "no problem; torch 2.13.0+cu130, built for CUDA 13.0; no GPU is visible; runs take CPU ranks"
    )
    cli.main(["doctor", "-v"])
    assert "torch          ok       2.13.0+cu130" in capsys.readouterr().out


def test_command_ends_with_1_and_the_remedy_where_something_breaks_a_run(machine, capsys):
    machine.setattr(doctor, "probe_torch", lambda: "No module named 'torch'")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("torch  PROBLEM  can't be imported: No module named 'torch'\n")
    assert "-> install torch as https://pytorch.org/get-started says" in out
    assert out.splitlines()[-1].startswith("1 problem; no GPU is visible")
