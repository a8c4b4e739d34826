"""The life of a rank, in this process and without a process group."""

import os
import zipfile

import pytest

from pytest_aorta.plan.workloads import WorkloadSpec
from pytest_aorta.worker import lifecycle
from pytest_aorta.worker.lifecycle import run_rank
from tests.rank.ranks import run_rank_alone
from tests.unit.builders import each_of, read_json, write_plan
from tests.unit.wheels import make_wheel

FORGETFUL = """
import math

import torch

from pytest_aorta.worker import RankResult, Workload

class Forgetful(Workload):
    def setup(self):
        pass

    def run(self):
        return RETURNED

    def cleanup(self):
        pass
"""


RESULT = (
    "RankResult(passed=True, failure_count=0, configured_iterations=1, total_iterations=1, elapsed_sec=1.0, "
    "step_times_ms={})"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of rank 0, which this process is."""
    monkeypatch.setenv("RANK", "0")
    (path := tmp_path / "ranks" / "0").mkdir(parents=True)
    return path


@each_of(
    "text, by, error, message",
    {
        "another class": (
            "(Workload)",
            "",
            TypeError,
            "Forgetful has to be a subclass of pytest_aorta.worker.Workload",
        ),
        "nothing": (
            "RETURNED",
            "None",
            TypeError,
            r"^Forgetful\.run\(\) returned None; it has to return a RankResult$",
        ),
        "a tensor": (
            "RETURNED",
            RESULT.format("torch.ones(1)"),
            TypeError,
            r"^the result of Forgetful\.run\(\): \$\.step_times_ms: got ",
        ),
        "no times": (
            "RETURNED",
            RESULT.format("None"),
            TypeError,
            r"^the result of Forgetful\.run\(\): \$\.step_times_ms: got null",
        ),
        "NaN": (
            "RETURNED",
            RESULT.format("[math.nan]"),
            ValueError,
            r"a number that is not finite: step_times_ms\.0 = nan$",
        ),
    },
)
def test_wrong_class_or_result_names_the_class_or_the_field(folder, tmp_path, monkeypatch, text, by, error, message):
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    own = tmp_path / "forgetful"
    own.mkdir()
    (own / "__init__.py").write_text(FORGETFUL.replace(text, by))
    spec = WorkloadSpec(name="forgetful", folder=own, class_name="Forgetful", description="A workload.")
    write_plan(tmp_path, spec=spec, script=None)
    with pytest.raises(error, match=message):
        run_rank(tmp_path, folder)
    assert not (folder / "result.json").exists()


def test_world_with_fewer_ranks_than_the_declaration_asks_for_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    spec = WorkloadSpec(name="toy", folder=tmp_path, class_name="Toy", description="A workload.", min_world_size=3)
    write_plan(tmp_path, spec=spec, script=None)
    with pytest.raises(
        RuntimeError, match=r"workload 'toy' needs at least 3 ranks and was started with WORLD_SIZE=2: .*size=3"
    ):
        run_rank(tmp_path, folder)


FORKING = """
import os, sys

child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
sys.exit(3)
"""


def test_process_that_a_script_has_forked_leaves_no_result(folder, tmp_path, monkeypatch):
    pid = os.getpid()
    (tmp_path / "train.py").write_text(FORKING)
    monkeypatch.setattr(lifecycle.recording, "result", lambda: None)
    write_plan(tmp_path)
    try:
        with pytest.raises(SystemExit):
            run_rank(tmp_path, folder)
    finally:
        if os.getpid() != pid:
            os._exit(0)
        lifecycle.recording.steps.stop()
    assert not (folder / "result.json").exists()


LEAVING = """
import atexit, os, torch
atexit.register(os._exit, 5)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os._exit(0)
"""


def test_script_that_leaves_at_once_has_a_result_and_its_handlers_do_not_run(folder, tmp_path):
    (tmp_path / "train.py").write_text(LEAVING)
    write_plan(tmp_path)
    assert run_rank_alone(tmp_path, folder).returncode == 0
    assert len(read_json(folder / "result.json")["step_times_ms"]) == 4


LOOKING = """
import importlib.metadata, first, json
assert (first.VERSION, importlib.metadata.version("first")) == ("2.0", "2.0")
"""


def test_packages_of_a_side_come_first_and_none_was_imported_before(folder, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(LOOKING + LEAVING)
    write_plan(tmp_path)
    for name in ("first", "json"):
        with zipfile.ZipFile(make_wheel(tmp_path, name, "2.0")) as wheel:
            wheel.extractall(tmp_path / name)
    monkeypatch.setenv("AORTA_FIRST_PATH", str(tmp_path / "first"))
    assert run_rank_alone(tmp_path, folder).returncode == 0
    monkeypatch.setenv("AORTA_FIRST_PATH", str(tmp_path / "json"))
    with pytest.raises(ImportError, match=r"^json was imported before .*/json was put on the search path$"):
        run_rank(tmp_path, folder)
