"""Two versions of torch as the sides of an A/B and of a search, with real launches."""

import os
import sys
from pathlib import Path

import pytest

from tests.unit.builders import run_python, write

OTHER = os.environ.get("AORTA_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not OTHER, reason="needs AORTA_OTHER_PYTHON, an interpreter with this package and another torch"
    ),
]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(int(torch.__version__.split(".")[1]) if sys.argv[1:] else 0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(16, 64)).square().mean().backward()
    optimizer.step()
"""
TESTS = """
import pytest

pytestmark = pytest.mark.world(size=2, device="cpu")

def test_fsdp(workload):
    workload.check(workload.run("fsdp"))

def test_script(workload):
    workload.check(workload.run_script("train.py", record={}))

@pytest.mark.tolerance(weight_hash="exact")
def test_planted(workload):
    record = {"hash_weights": True, "deterministic": True}
    workload.check(workload.run_script("train.py", ["planted"], record=record))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a module on the tests with real launches, and return its output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "train.py", SCRIPT)
    write(tmp_path / "test_train.py", TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly --aorta-launcher=forkserver\n")

    def output(code, *words):
        done = run_python("-m", *words, cwd=tmp_path, timeout=550)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return output


def test_programs_that_depend_on_no_version_are_equal_on_both(run):
    output = run(
        0, "pytest", "-v", "test_train.py", "-k", "fsdp or script", f"--aorta-ab=python:{Path(OTHER).absolute()}"
    )
    assert "aorta: 2 tests OK" in output
    assert "not compared (operators: torch is " in output


def test_search_names_torch(run):
    sides = [f"python:{Path(OTHER).absolute()}", f"python:{sys.executable}"]
    output = run(1, "pytest_aorta.cli", "bisect", *sides, "--over=packages", "--", "test_train.py::test_planted")
    found = output.partition("::train.py: found: ")[2].partition("Regression: ")[0]
    assert "torch " in found, output
