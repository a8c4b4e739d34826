"""``aorta bisect`` finds planted commits by launching real ranks."""

from pathlib import Path

import pytest

from tests.distributed.processes import own_environ
from tests.distributed.test_reference_launches import git, write
from tests.unit.builders import run_python

pytestmark = pytest.mark.extended

SCRIPT = """
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pytest_aorta.worker import recorder
from settings import DELAY_S, ULPS

dist.init_process_group("gloo")
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
with torch.no_grad():
    for _ in range(ULPS):
        model.weight[3, 5] = torch.nextafter(model.weight[3, 5], torch.tensor(float("inf")))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    with recorder.step():
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(DELAY_S)
recorder.weights(model)
dist.destroy_process_group()
"""
TESTS = """
import pytest

pytestmark = [pytest.mark.launch_timeout(240), pytest.mark.world(size=2, device="cpu")]

@pytest.mark.tolerance(weight_hash="exact")
def test_weights(workload):
    workload.check(workload.run_script("train.py"))

@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.tolerance(step_time_p50="100%")
def test_speed(workload):
    workload.check(workload.run_script("train.py"))
"""


def bisect(folder: Path, settings: list[str], node: str) -> tuple[str, list[str]]:
    """Search a repository with one commit per text of settings; return output and hashes of the commits."""
    git(folder, "init", "-q")
    write(folder / "train.py", SCRIPT)
    for number, text in enumerate(settings):
        write(folder / "settings.py", f"{text}\n# {number}\n")
        git(folder, "add", "train.py", "settings.py")
        git(folder, "commit", "-qm", f"change {number}")
    write(folder / "test_train.py", TESTS)
    write(folder / "pytest.ini", "[pytest]\n")
    commits = git(folder, "rev-list", "--reverse", "HEAD").splitlines()
    environ = own_environ(folder / "leases", XDG_CACHE_HOME=str(folder.parent / f"{folder.name}-cache"))
    command = ("-m", "pytest_aorta.cli", "bisect", commits[0], commits[-1], "--", node)
    done = run_python(*command, cwd=folder, env=environ, timeout=None)
    print(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, commits


def test_change_of_one_ulp_is_found_among_32_commits(tmp_path):
    settings = [f"DELAY_S, ULPS = 0.0, {int(number >= 19)}" for number in range(33)]
    output, commits = bisect(tmp_path, settings, "test_train.py::test_weights")
    assert f"found: {commits[19][:7]} change 19" in output


def test_slowdown_is_found_among_16_commits(tmp_path):
    settings = [f"DELAY_S, ULPS = {0.02 if number < 7 else 0.2}, 0" for number in range(17)]
    output, commits = bisect(tmp_path, settings, "test_train.py::test_speed")
    assert f"found: {commits[7][:7]} change 7" in output
