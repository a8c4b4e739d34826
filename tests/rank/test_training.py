"""What steps train with, of scripts that give optimizers and loaders unusual values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pytest_aorta.common.model import to_json
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.series import Setting
from pytest_aorta.worker import TrainingNotes
from pytest_aorta.worker.recorder import Recording
from tests.unit.builders import each_of


class Unreadable(Mapping[str, Any]):
    """A mapping that computes what it holds."""

    def __getitem__(self, key):
        raise RuntimeError("not to be read")

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


def holds_itself(_rows):
    batch: list[Any] = [torch.ones(2)]
    batch.append(batch)
    return batch


def changed(group: dict[str, Any], number: int) -> None:
    if number == 2:
        del group["gone"]
        group["becomes"] = torch.ones(3)


@pytest.mark.parametrize("collate", [None, holds_itself, lambda _: Unreadable(), lambda _: {"x": torch.empty(0, 4)}])
@each_of("rate", {"float": 0.01, "NumPy": np.float64(0.01), "tensor": torch.tensor(0.01)})
def test_script_with_unusual_values_is_not_broken(collate, rate):
    recording = Recording()
    observer = recording.observe(StepRecording(warmup=0))
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=rate)
    optimizer.param_groups[0] |= {"gone": 1, "becomes": 1, "infinite": float("inf")}
    for number, _ in enumerate(DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4, collate_fn=collate)):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        changed(optimizer.param_groups[0], number)
    observer.stop()
    [series] = recording.result().series
    assert Setting("clipped to", values={"1": "inf"}) in series.settings
    to_json(series)


def test_batches_of_every_loader_of_a_step_are_sampled_but_not_those_of_an_evaluation():
    def samples(seed: int, evaluated: float = 0.0) -> dict[str, list[str]]:
        recording = Recording()
        observer = recording.observe(StepRecording(warmup=0))
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        drawn = torch.rand(48, 4, generator=torch.Generator().manual_seed(seed))
        unlabeled, labeled = (
            DataLoader(TensorDataset(rows), batch_size=len(rows) // 6) for rows in (drawn, drawn[:12])
        )
        for step, [first] in enumerate(unlabeled, 1):
            # An epoch of a loader ends within a step.
            epochs = iter(labeled), iter(labeled)
            [second], _ = map(next, epochs)
            with torch.no_grad():
                list(DataLoader(torch.full((3, 4), evaluated)))
            model(torch.cat([first, second])).sum().backward()
            optimizer.param_groups[0]["lr"].fill_(0.1 * step)
            optimizer.step()
        observer.stop()
        [series] = recording.result().series
        assert Setting("lr", values={str(step): step / 10 for step in range(1, 7)}) in series.settings
        return series.samples

    assert len(samples(0)["1"]) == 10
    assert samples(0) == samples(0, evaluated=1.0) != samples(1)


def test_setting_that_changes_later_is_noted_in_the_next_step_that_is_a_power_of_two():
    recording = Recording()
    observer = recording.observe(StepRecording(warmup=0))
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1))
    optimizer = SGD([model[0].weight], lr=0.1)
    for step in range(1, 65):
        optimizer.param_groups[0]["lr"] = model[1].p = 0.1 if step < 40 else 0.2
        if step == 3:
            optimizer.add_param_group({"params": [model[0].bias], "lr": 0.3})
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    observer.stop()
    [series] = recording.result().series
    assert Setting("lr", values={"1": 0.1, "64": 0.2}) in series.settings
    assert Setting("lr", "0.bias", values={"3": 0.3}) in series.settings
    # What the next step drops is read after a step.
    assert Setting("dropout", values={"1": "0.1", "65": "0.2"}) in series.settings


class Filtered(nn.Sequential):
    """Has a method that does not take all arguments of the module's, as losses of torchrl do."""

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)


def test_notes_of_a_workload_have_settings_and_samples_of_its_steps():
    model = Filtered(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1)
    notes = TrainingNotes(optimizer, model)
    assert notes.series() == []
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 3 else 0.1 / step
        notes.end_step((torch.full((2, 4), step), torch.ones(2)), clipped_to=1.0)
    [series] = notes.series()
    found = {one.name: one.values for one in series.settings}
    assert (series.name, series.num_steps) == ("SGD of Filtered", 40)
    assert (found["dropout"], found["clipped to"]) == ({"1": "0.1"}, {"1": 1.0})
    assert found["tied parameters"] == {"1": "0.weight = 2.weight"}
    assert found["batch"] == {"1": "[2, 4] int64, [2] float32"}
    assert [*found["lr"]] == ["1", *map(str, range(3, 33))]
    assert [*series.samples] == [*map(str, range(1, 33))]
    assert len({*series.samples["8"], *series.samples["16"]}) == 2
