"""Parameters that a rank can find, checked for NaN and infinite values."""

import re

import pytest
import torch
from aorta_workloads.fsdp import FsdpWorkload
from aorta_workloads.fsdp.buffers import Buffers
from aorta_workloads.fsdp.settings import Settings
from torch import nn

from pytest_aorta.worker import Recorder, Workload
from pytest_aorta.worker.finite import NotFinite, refuse_parameters
from pytest_aorta.worker.recorder import Recording
from tests.rank.settings import default_config

NAN = float("nan")


@pytest.fixture(autouse=True)
def rank_1(monkeypatch):
    monkeypatch.setenv("RANK", "1")


class OwnWorkload(Workload):
    """A workload that does not name its parameters."""

    def setup(self):
        self.model = nn.Linear(3, 2)
        self.wrapped = nn.Sequential(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def run(self):
        raise NotImplementedError

    def cleanup(self):
        raise NotImplementedError


def refuse(workload):
    refuse_parameters(workload.named_parameters(), "at the end of the run")


def test_modules_of_a_workload_are_known_without_its_help_and_checked_once():
    workload = OwnWorkload({})
    workload.setup()
    assert [name for name, _ in workload.named_parameters()] == ["model.weight", "model.bias"]
    refuse(workload)
    with torch.no_grad():
        workload.model.bias[1] = float("inf")
    expected = "parameter model.bias of rank 1 has 1 of 2 elements that are NaN or infinite at the end of the run; "
    with pytest.raises(NotFinite, match=f"^{re.escape(expected)}"):
        refuse(workload)


def test_parameters_without_data_are_left_out():
    workload = OwnWorkload({})
    workload.model = nn.Linear(3, 2, device="meta")
    workload.lazy = nn.LazyLinear(2)
    workload.empty = nn.Module()
    workload.empty.none = nn.Parameter(torch.empty(0, 2))
    workload.empty.counter = nn.Parameter(torch.tensor(3), requires_grad=False)
    workload.rounded = nn.Linear(3, 2, bias=False)
    refuse(workload)
    with torch.no_grad():
        workload.rounded.weight[0, 0] = NAN
    with pytest.raises(NotFinite, match=r"^parameter rounded.weight of rank 1 has 1 of 6 elements"):
        refuse(workload)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64], ids=str
)
def test_every_kind_of_floating_number_is_checked(dtype):
    refuse_parameters([("w", torch.tensor([1.0, 2.0]).to(dtype))], "now")
    with pytest.raises(NotFinite, match=r"^parameter w of rank 1 has 1 of 2 elements"):
        refuse_parameters([("w", torch.tensor([1.0, NAN]).to(dtype))], "now")


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
def test_own_shards_of_fsdp_are_checked_where_it_trains(optimizer):
    config = default_config("fsdp", layers=2, optimizer=optimizer)
    workload = FsdpWorkload(config)
    settings = Settings.read(config, 1, 2)
    workload.buffers = Buffers(settings, torch.device("cpu"))
    trained = optimizer != "none"
    assert len(list(workload.named_parameters())) == 2 * trained
    refuse(workload)
    for weight in workload.buffers.weights:
        weight[0] = NAN
    if trained:
        expected = f"parameter layers.0.weight of rank 1 has 1 of {settings.fsdp_shard_size} elements that are NaN"
        with pytest.raises(NotFinite, match=f"^{re.escape(expected)}"):
            refuse(workload)


def test_model_that_was_hashed_is_checked_again_when_the_script_ends(monkeypatch):
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    recording, model = Recording(), nn.Linear(3, 2)
    recorder = Recorder(recording)
    assert list(recording.named_parameters()) == []
    with recorder.step():
        pass
    recorder.weights(model)
    refuse(recording)
    with torch.no_grad():
        model.weight[1, 2] = NAN
    with pytest.raises(NotFinite, match=r"^parameter weight of rank 1 has 1 of 6 elements that are NaN or infinite at"):
        refuse(recording)
    # A model that the script has dropped is not kept in memory, so its parameters are no longer known.
    del model
    assert list(recording.named_parameters()) == []
